"""How each ATen operation becomes an expression of its arguments' elements. Every file of this folder is imported."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
