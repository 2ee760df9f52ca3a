"""The readable artefacts of each build, one numbered folder a build, in the folder TORCH_MPK_DUMP names."""

from __future__ import annotations

import itertools
from pathlib import Path

from torch_mpk.config import env


class Dump:
    """Where one build leaves its artefacts; nowhere when TORCH_MPK_DUMP is not set."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def next(cls) -> Dump:
        if env.dump is None:
            return cls(None)
        for number in itertools.count(1):
            folder = env.dump / f"{number:03}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # an earlier build, or one of another process
                continue
            return cls(folder)
        raise AssertionError

    @classmethod
    def at(cls, folder: Path) -> Dump:
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def segment(self, index: int, num_segments: int) -> Dump:
        """The folder of one of several segments; a graph that is one segment has no folders inside."""
        if self._folder is None or num_segments == 1:
            return self
        folder = self._folder / f"segment_{index}"
        folder.mkdir()
        return Dump(folder)

    def write(self, name: str, content: str | bytes) -> None:
        if self._folder is not None:
            (self._folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
