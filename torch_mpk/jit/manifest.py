"""Which files a compiler reads for a source, by its own account: listed once, and looked at by every later look-up."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where compilers look for files. What their environment adds to their command lines, each of them names itself.
SEARCH_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *("LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "SDKROOT"),
)

# Begins with letters, which a search skips to: #include and __has_include(, and what looks like them in other text.
_SPELLED = re.compile(rb'include(?:_next)?[ \t]*\(?[ \t]*["<]([^">\n]+)[">]')
_MISSING = "missing"
_SETTLED_NS = 10**9


@dataclass(frozen=True)
class Reading:
    """What a compiler says about a source."""

    files: list[Path]  # that it reads, beside the source
    folders: list[Path]  # in which it looks for headers; they need not exist
    error: str = ""  # where it cannot tell


@dataclass(frozen=True)
class Manifest:
    """The files that were read, and what a new file would have to be called to be read in place of one of them."""

    files: tuple[str, ...]
    folders: tuple[str, ...]  # that are searched, or hold a file that was read, and those below them that are named
    names: tuple[str, ...]  # in includes and __has_include, part by part
    present: str  # hash of which of the names stand in which of the folders

    @staticmethod
    def of(source: str, reading: Reading, named: Iterable[Path]) -> Manifest:
        """``named``: files of the command line."""
        files = dict.fromkeys([*reading.files, *named])
        spelled = {Path(file.name) for file in files}
        for text in (source.encode(), *map(_content, reading.files)):
            spelled.update(Path(os.fsdecode(name)) for name in _SPELLED.findall(text))
        names = {part for path in spelled for part in path.parts}
        parents = {path.parent for path in spelled}
        folders: set[Path] = set()
        for folder in {*reading.folders, *(file.parent for file in reading.files)}:
            while not folder.is_dir() and folder != folder.parent:
                names.add(folder.name)
                folder = folder.parent
            folders.update(below for parent in parents if (below := folder / parent).is_dir())
        places = tuple(sorted(map(str, folders)))
        known = tuple(sorted(names))
        return Manifest(tuple(map(str, files)), places, known, _present(places, known))

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Manifest:
        """Raises KeyError, TypeError or ValueError where these are not the fields of one."""
        lists = {name: tuple(map(os.fspath, fields[name])) for name in ("files", "folders", "names")}
        return Manifest(**lists, present=str(fields["present"]))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def digests(self) -> list[str]:
        """Of the files' content as it is now."""
        return [_digest(path) for path in self.files]

    def is_current(self) -> bool:
        """Whether a compiler would find the same files, if all of them have the content they had."""
        return _present(self.folders, self.names) == self.present


def settings(variables: Iterable[str]) -> dict[str, str]:
    """Those of some environment variables that are set."""
    return {name: os.environ[name] for name in variables if name in os.environ}


def named_files(words: Iterable[str]) -> Iterator[Path]:
    """The files that words of a command line name, by absolute path, and those that its response files name."""
    pending, seen = [list(words)], set()
    while pending:
        line = pending.pop()
        for before, word in zip(["", *line], line):
            for path in map(Path, (word, *re.split("[=,@]", word))):
                if not path.is_absolute() or path in seen or not path.is_file():
                    continue
                seen.add(path)
                yield path
                if "@" in word or any(option.startswith(("-optf", "--options-file")) for option in (before, word)):
                    pending.append(split(path.read_text(errors="replace")))


def split(text: str) -> list[str]:
    """The words of a command line."""
    try:
        return shlex.split(text)
    except ValueError:  # which the compiler will say
        return text.split()


def parse_rule(rule: str) -> list[Path]:
    """The prerequisites of a rule for make."""
    names = re.findall(r"(?:\\.|\S)+", rule.replace("\\\n", " "))
    return [Path(re.sub(r"\\(.)", r"\1", name).replace("$$", "$")) for name in names[1:]]


def parse_search(log: str) -> list[Path]:
    """The folders that a compiler with -v says it searches, or would if they were there."""
    listed = re.search(r'^#include "\.\.\." search starts here:\n(.*?)^End of search list', log, re.M | re.S)
    lines = [line[1:] for line in listed[1].splitlines() if line.startswith(" ")] if listed else []
    missing = re.findall(r'^ignoring nonexistent directory "(.*)"$', log, re.M)
    return [Path(line.removesuffix(" (framework directory)")) for line in (*lines, *missing)]


_digests: dict[str, tuple[tuple[int, ...], str]] = {}


def _digest(path: str) -> str:
    """Of a file's content. A process reads a file again only where its inode says that it changed: a time of change
    cannot be set back, and where it is recent, another change may have followed within the same tick of the clock."""
    try:
        stat = os.stat(path)
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = _digests.get(path)
        if known is not None and known[0] == state:
            return known[1]
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return _MISSING
    if time.time_ns() - stat.st_ctime_ns > _SETTLED_NS:
        _digests[path] = state, digest
    return digest


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _present(folders: Iterable[str], names: Iterable[str]) -> str:
    wanted, digest = frozenset(names), hashlib.sha256()
    for folder in folders:
        try:
            found = sorted(wanted.intersection(os.listdir(folder)))
        except OSError:
            found = []
        digest.update(repr((folder, found)).encode())
    return digest.hexdigest()
