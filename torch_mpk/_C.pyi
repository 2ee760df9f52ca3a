# The C++ core is described where it is bound (csrc/*/bindings.cpp); to a type checker it is anything.
from typing import Any

def __getattr__(name: str) -> Any: ...
