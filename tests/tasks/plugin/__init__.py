"""A package of tasks as a user would ship it: each is a Python file and the device code beside it."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
