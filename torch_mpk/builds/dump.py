"""The readable artefacts of each build, one numbered folder a build, in the folder TORCH_MPK_DUMP names."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_mpk.config import env
from torch_mpk.warn_once import warn


class Dump:
    """Where one build leaves its artefacts; nowhere when TORCH_MPK_DUMP is not set."""

    def __init__(self, folder: Path | None, is_asked_for: bool = True) -> None:
        self._folder = folder
        self._is_asked_for = is_asked_for  # by a call, which fails without it

    @classmethod
    def next(cls) -> Dump:
        if env.dump is None:
            return cls(None)
        dump = cls(env.dump, is_asked_for=False)
        with dump._writing():
            for number in itertools.count(1):
                folder = env.dump / f"{number:03}"
                with contextlib.suppress(FileExistsError):  # an earlier build, or one of another process
                    folder.mkdir(parents=True)
                    return cls(folder, is_asked_for=False)
        return cls(None)

    @classmethod
    def at(cls, folder: Path) -> Dump:
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def segment(self, index: int, num_segments: int) -> Dump:
        """The folder of one of several segments; a graph that is one segment has no folders inside."""
        if self._folder is None or num_segments == 1:
            return self
        folder = self._folder / f"segment_{index}"
        with self._writing():
            folder.mkdir()
        return Dump(self._folder and folder, self._is_asked_for)

    @property
    def is_wanted(self) -> bool:
        return self._folder is not None

    def inside(self, name: str) -> Dump:
        """A folder of that name in this one."""
        if self._folder is None:
            return self
        folder = self._folder / name
        with self._writing():
            folder.mkdir(exist_ok=True)
        return Dump(self._folder and folder, self._is_asked_for)

    def write(self, name: str, content: str | bytes | Callable[[], str | bytes]) -> None:
        """``content`` that takes long to make is a function, which is called where there is a folder."""
        if self._folder is not None:
            if callable(content):
                content = content()
            with self._writing():
                (self._folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A full or closed folder that TORCH_MPK_DUMP names costs the artefacts, and a warning, but not the build:
        looking at how a model runs does not change it."""
        try:
            yield
        except OSError as error:
            if self._is_asked_for:
                raise
            warn(f"TORCH_MPK_DUMP={env.dump}: the artefacts of a build are left out: {error}")
            self._folder = None
