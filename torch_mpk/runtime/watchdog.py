"""How long a launch may go without progress."""

from __future__ import annotations

from torch_mpk.config import Options, env

DEFAULT_WATCHDOG_SECONDS = 10.0


def watchdog_seconds(options: Options) -> float:
    """0 is for ever."""
    settings = (options.watchdog_seconds, env.watchdog_seconds, DEFAULT_WATCHDOG_SECONDS)
    return next(seconds for seconds in settings if seconds is not None)


def finite_seconds(watchdog: float) -> float:
    """A watchdog's seconds where a wait has to end: a minute in place of for ever."""
    return watchdog or 60


def meeting_seconds(watchdog: float) -> float:
    """How long to wait for a rank whose launch may have to end before it comes."""
    return 3 * finite_seconds(watchdog) + 10
