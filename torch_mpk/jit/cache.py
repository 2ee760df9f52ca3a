"""A directory of compiled kernels, of what was read for them, of builds that use them, and of traces, each found by a
key.

An entry is a directory, moved into place in one step, so that a reader or another process sees all of it or nothing:
no locks. ``report.json`` lists size and hash of the other files; an entry that does not match is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch_mpk.errors import CacheError

NUM_KEY_DIGITS = 16  # of a key that lists show
_REPORT = "report.json"
Kind = Literal["kernels", "manifests", "builds", "traces"]
_MAX_ATTEMPTS = 8  # to replace an entry, which other processes may do at the same time
_ABANDONED_SECONDS = 24 * 3600  # a temporary directory this old belongs to a process that died


@dataclass(frozen=True)
class Entry:
    key: str
    path: Path
    files: dict[str, bytes]
    report: dict


class Cache:
    """``root`` holds ``<kind>/<key>/``, ``failed/<key>/`` (sources that did not compile) and ``tmp/``. One object looks
    at one kind of entry; the limit is for all of them."""

    def __init__(self, root: Path, limit_bytes: int, kind: Kind = "kernels") -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._entries, self._failed, self._tmp = (root / name for name in (kind, "failed", "tmp"))
        self._all = [root / name for name in (*get_args(Kind), "failed")]

    def get(self, key: str) -> Entry | None:
        """The entry, its files checked against their hashes; None when there is none or it is damaged."""
        path = self._entries / key
        if not path.is_dir():
            return None
        self._check_permissions()
        entry = _read(path)
        if entry is not None:
            with contextlib.suppress(OSError):  # a cache we may only read
                os.utime(path)
        return entry

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A new directory to build an entry in; what ``put`` or ``keep_failed`` did not move away is deleted.

        Raises CacheError when it cannot be made.
        """
        try:
            for path in (self.root, self._entries, self._failed, self._tmp):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_permissions()
            path = Path(tempfile.mkdtemp(dir=self._tmp))
        except OSError as error:
            raise CacheError(f"cannot write to the kernel cache {self.root}: {error}") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def write(self, workspace: Path, files: Mapping[str, bytes]) -> None:
        """Write files into a workspace. Raises CacheError where the disk does not take them."""
        for name, content in files.items():
            with self._writing(len(content)):
                (workspace / name).write_bytes(content)

    def put(self, key: str, workspace: Path, report: dict) -> Entry:
        """Make ``workspace`` the entry of ``key``, on disk before it is visible; evict what there is no room for.

        Raises CacheError where the disk does not take it, or a damaged entry is in its place and stays there.
        """
        files = {path.name: path.read_bytes() for path in sorted(workspace.iterdir())}
        self._seal(workspace, files, report)
        target = self._entries / key
        for _ in self._attempts(target):
            if self._publish(workspace, target):
                break
            entry = _read(target)  # another process was faster, or the entry is damaged
            if entry is not None:
                return entry
            self._remove(target)
        self._evict(keep=target)
        return Entry(key, target, files, report)

    def replace(self, key: str, report: dict) -> None:
        """Make a report alone the entry of ``key``, in place of what is there. Nothing is evicted for it: it may be of
        a kernel that its caller has just found."""
        with self.workspace() as workspace:
            self._seal(workspace, {}, report)
            target = self._entries / key
            for _ in self._attempts(target):
                if self._publish(workspace, target):
                    break
                self._remove(target)

    def keep_failed(self, key: str, workspace: Path) -> Path:
        """Keep a build that failed, for its author to look at; replaces an earlier one of the same key."""
        target = self._failed / key
        self._remove(target)
        with contextlib.suppress(OSError):  # another process was faster
            workspace.rename(target)
        self._evict(keep=target)
        return target

    def entries(self) -> list[Entry]:
        """The intact entries, least recently used first."""
        return [entry for path in _by_age(self._entries) if (entry := _read(path)) is not None]

    def clear_named(self, name: str) -> int:
        """Delete the entries of a kernel or task, or the one whose key begins so, and return their number."""
        is_key = len(name) >= NUM_KEY_DIGITS

        def is_named(entry: Entry) -> bool:
            return name in entry.report.get("names", ()) or (is_key and entry.key.startswith(name))

        named = [entry for entry in self.entries() if is_named(entry)]
        for entry in named:
            self._remove(entry.path)
        return len(named)

    def clear(self) -> int:
        """Delete everything, and return the number of entries of this kind there were."""
        num_entries = len(_by_age(self._entries))
        for parent in (*self._all, self._tmp):
            for path in _by_age(parent):
                self._remove(path)
        return num_entries

    @staticmethod
    def _attempts(target: Path) -> Iterator[None]:
        """To put an entry in the place of another, which may come back, but not for ever."""
        yield from [None] * _MAX_ATTEMPTS
        raise CacheError(f"cannot remove {target} from the kernel cache, to put what is intact in its place")

    def _publish(self, workspace: Path, target: Path) -> bool:
        with self._writing(_size(workspace)):
            try:
                workspace.rename(target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # though it may have been removed since
                    return False
                raise
            _fsync(self._entries)
        return True

    def _seal(self, workspace: Path, files: dict[str, bytes], report: dict) -> None:
        index = {name: _fingerprint(data) for name, data in files.items()}
        self.write(workspace, {_REPORT: json.dumps({"report": report, "files": index}, indent=2).encode()})
        with self._writing(_size(workspace)):
            for path in [*workspace.iterdir(), workspace]:
                _fsync(path)

    @contextlib.contextmanager
    def _writing(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"cannot write {num_bytes} bytes to the kernel cache {self.root}"
            raise CacheError(f"{what}: {error.strerror} ({_free(self.root)})") from error

    def _check_permissions(self) -> None:
        # Who can write here can run code in our process.
        for path in (self.root, self._entries):
            if stat.S_IMODE(path.stat().st_mode) & stat.S_IWOTH:
                raise CacheError(f"{path} is writable for everyone: run chmod o-w {path}")

    def _remove(self, path: Path) -> None:
        # Out of sight in one step, so that nobody reads half an entry.
        doomed = self._tmp / f"{path.name}.{os.getpid()}.{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            path.rename(doomed)
            path = doomed
        shutil.rmtree(path, ignore_errors=True)

    def _evict(self, keep: Path) -> None:
        for path in _by_age(self._tmp):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        paths = sorted((path for parent in self._all for path in _by_age(parent)), key=_age)
        sizes = {path: _size(path) for path in paths}
        total = sum(sizes.values())
        for path in paths:
            if total <= self.limit_bytes:
                return
            if path != keep:
                self._remove(path)
                total -= sizes[path]


def _fingerprint(data: bytes) -> dict:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _read(path: Path) -> Entry | None:
    try:
        index = json.loads((path / _REPORT).read_text())
        files = {name: (path / name).read_bytes() for name in index["files"]}
        intact = all(_fingerprint(files[name]) == known for name, known in index["files"].items())
        return Entry(path.name, path, files, index["report"]) if intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _by_age(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir(), key=_age)
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir())
    except OSError:
        return 0


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free there"
    except OSError:
        return "it cannot be looked at"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
