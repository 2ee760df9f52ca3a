"""Tasks of installed packages: what entry points of group ``torch_mpk.tasks`` name is imported with torch_mpk."""

from __future__ import annotations

from importlib.metadata import entry_points

from torch_mpk.warn_once import warn

GROUP = "torch_mpk.tasks"


def load() -> None:
    """Import them. One that cannot be imported is left out with a warning: torch_mpk works without it."""
    for plugin in entry_points(group=GROUP):
        try:
            plugin.load()
        except Exception as error:
            package = plugin.dist.name if plugin.dist else "a package"
            tasks = f"the tasks {plugin.name!r} ({plugin.value}) of {package}"
            warn(f"{tasks} are left out: {type(error).__name__}: {error}")
