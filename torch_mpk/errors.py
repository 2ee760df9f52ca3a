"""Every error and warning class of torch_mpk."""

from __future__ import annotations


class MpkError(RuntimeError):
    """Base class of every error torch_mpk raises on purpose."""


class OptionError(MpkError, ValueError):
    """An option of the backend or a ``TORCH_MPK_*`` variable has an unknown name or a value that cannot be used."""


class UnsupportedError(MpkError):
    """A compile stage cannot take a node of the user's graph; the backend falls back.

    Attributes:
        reason: why, in words that follow "because".
        node: the node's name in the captured graph, or None when the whole graph is meant.
        source: the user's source line it comes from, ``file.py:line in function``, or None.
    """

    def __init__(self, reason: str, node: str | None = None, source: str | None = None) -> None:
        self.reason, self.node, self.source = reason, node, source
        at = f" from {source}" if source else ""
        super().__init__(f"{node}{at}: {reason}" if node else reason)


class CompileError(MpkError):
    """The device compiler rejected generated code, no compiler was found, or compiling is forbidden."""


class CacheError(MpkError):
    """The directory of compiled kernels cannot be used."""


class LaunchError(MpkError):
    """The driver could not load or launch a kernel, or a launch was aborted and its outputs are not valid."""


class MegakernelTimeout(LaunchError):
    """The watchdog aborted a launch that made no progress for ``watchdog_seconds``."""


class VerificationError(MpkError):
    """With ``options={"verify": ...}`` a call differed from eager."""

    def __init__(self, difference: str, culprit: str) -> None:
        super().__init__(f"{difference}. The first to differ: {culprit}")


class MpkWarning(UserWarning):
    """The backend runs something the way it would have run without torch_mpk."""
