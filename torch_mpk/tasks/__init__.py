"""The tasks, one per file. Every file of this folder is imported, and so declared, with the package."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
