"""The ranks of a process group, and how they meet: who is there, who is gone, and what each has come for."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_mpk.errors import MpkError, RankLostError, UnsupportedError, first_line

logger = logging.getLogger(__name__)

COMING_SECONDS = 1800.0  # how long ranks wait for one that still builds
PATIENCE_SECONDS = 60.0  # until a rank that waits says so
_POLL_SECONDS = 0.02
_ENDING_SECONDS = 0.5  # from the end of a process's connections to its own


def resolve(group: str) -> dist.ProcessGroup:
    """The process group of that name."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(group))


class Team:
    """The ranks of a process group. What is said between them goes over a gloo group of its own, so that nothing of the
    user's is in its way."""

    num_gathered = 0  # how often this process has met others

    def __init__(self, group: str) -> None:
        """Collective. ``group``: a process group's name.

        Raises:
            RankLostError: not all of its ranks come.
            UnsupportedError: one of them takes no part.
        """
        self.name, self.group = group, resolve(group)
        self.members = dist.get_process_group_ranks(self.group)
        self.rank = self.members.index(dist.get_rank())
        self._broken = ""  # what has ended all talk
        self._processes: dict[int, int] = {}  # ids of ranks' processes, where they mean the same here
        try:
            self._meet(COMING_SECONDS)
            self.talk = dist.new_group(self.members, backend="gloo", use_local_synchronization=True)
        except MpkError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from None

    @property
    def is_current(self) -> bool:
        """Whether the group has not been destroyed, nor another made under its name."""
        try:
            return resolve(self.name) is self.group
        except (RuntimeError, ValueError):
            return False

    @property
    def note(self) -> str:
        """Where ranks of the group have other numbers in the world, which these are; begins with a space."""
        if self.members == [*range(len(self.members))]:
            return ""
        return f" (in the world the ranks of group {self.name} are {', '.join(map(str, self.members))})"

    def _meet(self, seconds: float) -> None:
        """Waits for all ranks to come for the first time."""
        store = _store()
        keys = [f"torch_mpk/{self.name}/{member}" for member in self.members]
        if store.check([_away(dist.get_rank())]):  # no longer
            store.delete_key(_away(dist.get_rank()))
        store.set(keys[self.rank], f"{os.getpid()} {_processes_place()}")
        begin, is_told = time.monotonic(), False
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            for rank in missing:
                if store.check([_away(self.members[rank])]):
                    why = store.get(_away(self.members[rank])).decode()
                    raise UnsupportedError(f"rank {rank} of group {self.name} takes no part: {why}{self.note}")
            waited, who = time.monotonic() - begin, ", ".join(f"rank {rank}" for rank in missing)
            if waited > seconds:
                raise RankLostError(
                    f"rank {self.rank} of group {self.name} has waited {seconds:g} s for {who}{self.note}. "
                    f"{RankLostError.remedy}"
                )
            if waited > PATIENCE_SECONDS and not is_told:
                is_told = True
                logger.warning("rank %d of group %s waits for %s to build%s", self.rank, self.name, who, self.note)
            time.sleep(_POLL_SECONDS)
        for rank, key in enumerate(keys):
            process, _, place = store.get(key).decode().partition(" ")
            if place == _processes_place():
                self._processes[rank] = int(process)

    def gather(self, purpose: str, said: Any = None, seconds: float = COMING_SECONDS) -> list[Any]:
        """What each rank says. Collective.

        Raises RankLostError naming ranks that do not come in time, or that come for another ``purpose``.
        """
        if self._broken:
            raise RankLostError(
                f"the ranks of group {self.name} cannot talk to each other any more, since {self._broken}: start all "
                "of them anew"
            )
        Team.num_gathered += 1
        heard: list[Any] = [None] * len(self.members)
        try:
            with self._telling_of_patience(purpose):
                dist.monitored_barrier(self.talk, timedelta(seconds=seconds), wait_all_ranks=True)
            dist.all_gather_object(heard, (purpose, said), group=self.talk)
        except RuntimeError as error:
            raise self._lost(error) from None
        for rank, (other, _) in enumerate(heard):
            if other != purpose:
                raise RankLostError(
                    f"rank {self.rank} has come to {purpose}, but rank {rank} to {other}{self.note}. "
                    f"{RankLostError.remedy}"
                )
        return [said for _, said in heard]

    @contextlib.contextmanager
    def _telling_of_patience(self, purpose: str) -> Iterator[None]:
        text = "rank %d of group %s waits for the other ranks to %s: all must make the same calls%s"
        timer = threading.Timer(PATIENCE_SECONDS, logger.warning, [text, self.rank, self.name, purpose, self.note])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _lost(self, error: Exception) -> RankLostError:
        ended = self._ended()
        who = ", ".join(f"rank {rank}" for rank in ended)
        self._broken = f"{who} ended" if ended else f"rank {self.rank} met an error: {first_line(error)}"
        why = f"the process of {who} has ended" if ended else first_line(error)
        return RankLostError(f"rank {self.rank} of group {self.name}: {why}{self.note}. {RankLostError.remedy}")

    def _ended(self) -> list[int]:
        """Ranks whose processes have ended, or are about to."""
        until = time.monotonic() + _ENDING_SECONDS
        while not (ended := [rank for rank, process in self._processes.items() if _has_ended(process)]):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        return ended


_teams: dict[str, Team] = {}


def team_of(group: str) -> Team:
    """The ranks of the group of that name. Collective where they meet for the first time."""
    team = _teams.get(group)
    if team is None or not team.is_current:
        team = _teams[group] = Team(group)
    return team


def stay_away(why: str) -> None:
    """Has ranks that meet for the first time not wait for this one."""
    _store().set(_away(dist.get_rank()), why)


def _store() -> Any:
    """What all processes of the world read and write."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _away(member: int) -> str:
    return f"torch_mpk/away/{member}"


def _processes_place() -> str:
    """Where ids of processes mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return str(uuid.uuid4())


def _has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
