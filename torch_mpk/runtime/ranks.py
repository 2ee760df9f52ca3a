"""Executables that exchange with other ranks: their mailboxes, and how ranks come together again after an error.

torch.distributed brings processes and groups. Between processes of one machine mailboxes lie in shared memory, between
GPUs in symmetric memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_mpk.errors import MegakernelTimeout, UnsupportedError, first_line
from torch_mpk.runtime.team import Team, team_of
from torch_mpk.runtime.watchdog import meeting_seconds

SHARED_MEMORY = Path("/dev/shm")
_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def draw_as_first(group: str, generator: torch.Generator | None, device: torch.device) -> None:
    """Gives a generator, by default the device's own, the state that it has on the group's first rank. Collective."""
    generator = generator or _default_generator(device)
    generator.set_state(team_of(group).gather("draw tokens alike", generator.get_state())[0])


def draw_alike(group: str, generator: torch.Generator | None, device: torch.device) -> bool:
    """Whether a generator, by default the device's own, has one state on all ranks of the group. Collective."""
    states = team_of(group).gather("compare generators", (generator or _default_generator(device)).get_state())
    return all(torch.equal(state, states[0]) for state in states)


def _default_generator(device: torch.device) -> torch.Generator:
    generators = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]
    return generators[device.index or 0]


class RankedExecutable:
    """An executable whose launches exchange with those of other ranks. It is called when all ranks have ``join``ed."""

    def __init__(self, executable: Any, device: torch.device, seconds: float) -> None:
        """``seconds``: how long a launch waits for another rank, 0 for ever."""
        self._executable, self._device, self._seconds = executable, device, seconds
        self.group: str = executable.group
        self.ranks: int = executable.ranks
        self.exchange_key: str = executable.exchange_key
        self._team: Team | None = None
        self._mailbox: torch.Tensor | None = None
        self._kept: Any = None  # what the peers' mailboxes live as long as
        self._addresses: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    @property
    def jitter(self) -> int:
        """See ``_C.CudaExecutable``."""
        return int(self._executable.jitter)

    @jitter.setter
    def jitter(self, seed: int) -> None:
        self._executable.jitter = seed

    @property
    def peers(self) -> list[int]:
        """The numbers of the other ranks in the group; all where none has joined."""
        return [rank for rank in range(self.ranks) if self._team is None or rank != self._team.rank]

    @property
    def is_joined(self) -> bool:
        return self._team is not None and self._team.is_current

    def join(self) -> None:
        """Makes the mailboxes. Collective.

        Raises:
            UnsupportedError: on all ranks, where one cannot make or reach them.
            RankLostError: one does not come.
        """
        team = team_of(self.group)
        make = _symmetric_memory if self._device.type == "cuda" else _shared_memory
        self._mailbox, self._addresses, self._kept = make(team, self._executable.mailbox_bytes, self._device)
        self._begin(team)
        self._team = team

    def _begin(self, team: Team) -> None:
        """Begins to count launches, with an empty mailbox. No rank launches until all have one."""
        assert self._mailbox is not None
        self._mailbox.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        team.gather("begin to count launches")
        if self._device.type == "cuda":
            self._executable.join(team.rank, self._addresses, (self._mailbox, self._kept))
        else:
            self._executable.join(team.rank, self._addresses, int(1e9 * self._seconds))

    def call(self, *args: Any) -> None:
        """See ``Executable``.

        Raises RankLostError where another rank does not come, or has aborted.
        """
        self._launch(self._executable.call, args)

    def run(self, *args: Any) -> None:
        self._launch(self._executable.run, args)

    def _launch(self, launch: Callable[..., None], args: Sequence[Any]) -> None:
        if self._executable.is_torn:
            self._reunite()
        try:
            launch(*args)
        except MegakernelTimeout as error:
            notes = "" if self._team is None else f"{self._team.note}{self._team.limits}"
            if not notes:
                raise
            raise type(error)(f"{error}{notes}") from None

    def _reunite(self) -> None:
        """Waits for all ranks, each of which comes when its own launch has aborted, and begins anew."""
        self._team = team_of(self.group)
        self._team.gather("begin anew after an error", seconds=meeting_seconds(self._seconds))
        self._begin(self._team)


def _agreed(team: Team, made: Any, error: Exception | None) -> list[Any]:
    """What all ranks have made; raises on all of them where one could not."""
    said = team.gather("make mailboxes", (made, None if error is None else first_line(error)))
    failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why is not None]
    if failed:
        raise UnsupportedError(f"memory for exchanges cannot be had: {'; '.join(failed)}")
    return [each for each, _ in said]


def _shared_memory(team: Team, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, list[int], Any]:
    """This rank's mailbox, the addresses of all ranks', and what keeps these. The file of each is gone when all ranks
    have opened it, so nothing is left behind."""
    path: str | None = None
    error: Exception | None = None
    try:
        file, path = tempfile.mkstemp(prefix="torch_mpk.", dir=SHARED_MEMORY)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # else a full file system would be a bus error later
        finally:
            os.close(file)
    except OSError as reason:
        error = reason
    opened: list[torch.Tensor] = []
    try:
        paths = _agreed(team, path, error)
        try:
            opened = [_opened(each, num_bytes) for each in paths]
        except (OSError, RuntimeError) as reason:
            error = reason
        _agreed(team, None, error)
    finally:
        if path is not None:
            os.unlink(path)
    return opened[team.rank], [each.data_ptr() for each in opened], opened


def _opened(path: str, num_bytes: int) -> torch.Tensor:
    """The memory of a file that another process has made. PyTorch would make one that is not there.

    Raises OSError where it is not, since that process runs elsewhere.
    """
    if not os.path.exists(path):
        raise OSError(
            f"{path} of another rank is not there: all ranks must run on one machine, and share {SHARED_MEMORY}"
        )
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _symmetric_memory(team: Team, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, list[int], Any]:
    """The same between GPUs, without NVLink's multicast, which needs more of a machine than peers' memory does."""
    import torch.distributed._symmetric_memory as symmetric

    mailbox = handle = None
    error: Exception | None = None
    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        mailbox = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(mailbox, team.group)
    except (RuntimeError, ValueError) as reason:
        error = reason
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before
    _agreed(team, None, error)
    assert mailbox is not None and handle is not None
    return mailbox, list(_addresses(handle, mailbox)), handle


def _addresses(handle: Any, mailbox: torch.Tensor) -> Sequence[int]:
    """Where the mailboxes of all ranks lie, as this device sees them."""
    offset = mailbox.data_ptr() - handle.buffer_ptrs[handle.rank]
    return [pointer + offset for pointer in handle.buffer_ptrs]
