"""The ranks of a process group, and how they meet: who is there, who is gone, and what each has come for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_mpk.errors import MpkError, RankLostError, UnsupportedError, first_line
from torch_mpk.runtime.watchdog import finite_seconds, meeting_seconds

logger = logging.getLogger(__name__)

COMING_SECONDS = 1800.0  # how long ranks wait for one that still builds
PATIENCE_SECONDS = 60.0  # until a rank that waits says so
_POLL_SECONDS = 0.02
_ENDING_SECONDS = 0.5  # from the end of a process's connections to its own
_GONE = "gone"  # said of a rank that has waited in vain
_REMEDY = "Allow more compiles on all ranks: torch._dynamo.config.recompile_limit"


def resolve(group: str) -> dist.ProcessGroup:
    """The process group of that name."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(group))


class LeftError(UnsupportedError):
    """Ranks run what this one builds as they would without torch_mpk, and so has this one to."""


class Build(NamedTuple):
    """A build of a function that Dynamo may compile no more on another rank.

    Attributes:
        function: its name.
        watchdog: how long a launch waits for another rank, 0 for ever.
        runs_eagerly: whether all run it eagerly then. Else it raises.
    """

    function: str
    watchdog: float
    runs_eagerly: bool


class Team:
    """The ranks of a process group. What is said between them goes over a gloo group of its own, so that nothing of the
    user's is in its way.

    They meet where all *come*: each says so in the store of all processes, before it builds. Others may say there of
    one that does not that they have *left* it, to run a graph eagerly. What is said first holds for all.
    """

    num_come = 0  # how often this process has come to meet others

    def __init__(self, group: str) -> None:
        """``group``: a process group's name."""
        self.name, self.group = group, resolve(group)
        self.members = dist.get_process_group_ranks(self.group)
        self.rank = self.members.index(dist.get_rank())
        self.talk: Any = None  # once all have met
        self._num_met = 0
        self._broken = ""  # what has ended all talk
        self._processes: dict[int, int] = {}  # ids of ranks' processes, where they mean the same here

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

    @property
    def limits(self) -> str:
        """Names the functions that other ranks compile no more, and may run eagerly; begins with a space."""
        told = ""
        with contextlib.suppress(RuntimeError):  # the store goes with a process
            for rank, member in enumerate(self.members):
                if rank != self.rank and (limits := _limits_of(member)):
                    told += f" (rank {rank} has compiled {', '.join(limits)} as often as Dynamo allows. {_REMEDY})"
        return told

    def come(self) -> None:
        """Says that this rank comes, maybe with what it is about to build.

        Raises LeftError where the others have left.
        """
        Team.num_come += 1
        with self._losing():
            store, away = _store(), _away(dist.get_rank())
            if store.check([away]):  # no longer
                store.delete_key(away)
            said = self._said(self.rank, f"{os.getpid()} {_processes_place()}")
        if said == self._left:
            raise LeftError(
                f"the other ranks of group {self.name} have waited in vain for rank {self.rank}{self.note}, and run "
                "this graph eagerly"
            )

    def gather(
        self, purpose: str, said: Any = None, seconds: float = COMING_SECONDS, build: Build | None = None
    ) -> list[Any]:
        """What each rank says. Collective.

        Raises:
            RankLostError: naming ranks that do not come in time, or that come for another ``purpose``.
            UnsupportedError: a rank takes no part.
            LeftError: a rank runs what others ``build`` eagerly.
        """
        if self._broken:
            raise RankLostError(
                f"the ranks of group {self.name} cannot talk to each other any more, since {self._broken}: start all "
                "of them anew"
            )
        heard: list[Any] = [None] * len(self.members)
        with self._losing():
            self._meet(purpose, seconds, build)
            with self._telling_of_patience(purpose):
                dist.monitored_barrier(self.talk, timedelta(seconds=seconds), wait_all_ranks=True)
            dist.all_gather_object(heard, (purpose, said), group=self.talk)
            _store().delete_key(self._key(self.rank))
        self._num_met += 1
        for rank, (other, _) in enumerate(heard):
            if other != purpose:
                raise RankLostError(
                    f"rank {self.rank} has come to {purpose}, but rank {rank} to {other}{self.note}. "
                    f"{RankLostError.remedy}"
                )
        return [said for _, said in heard]

    def _meet(self, purpose: str, seconds: float, build: Build | None) -> None:
        """Waits for all ranks to come, and meets them for the first time."""
        self.come()
        try:
            self._wait(purpose, seconds, build)
        except BaseException:
            _store().set(self._key(self.rank), _GONE)
            raise
        if self.talk is None:
            self.talk = dist.new_group(self.members, backend="gloo", use_local_synchronization=True)

    def _wait(self, purpose: str, seconds: float, build: Build | None) -> None:
        begin, is_told = time.monotonic(), False
        while missing := [rank for rank in range(len(self.members)) if not self._has_come(rank)]:
            waited, who = time.monotonic() - begin, ", ".join(f"rank {rank}" for rank in missing)
            for rank in missing:
                self._check_away(rank)
                self._check_limit(rank, waited, build)
                if rank in self._processes and _has_ended(self._processes[rank]):
                    raise self._lost(RuntimeError(f"rank {rank} does not come"))
            if waited > seconds:
                raise RankLostError(
                    f"rank {self.rank} of group {self.name} has waited {seconds:g} s for {who} to {purpose}{self.note}"
                    f"{self.limits}. {RankLostError.remedy}"
                )
            if waited > PATIENCE_SECONDS and not is_told:
                is_told = True
                text = "rank %d of group %s waits for %s to %s%s%s"
                logger.warning(text, self.rank, self.name, who, purpose, self.note, self.limits)
            time.sleep(min(_POLL_SECONDS, waited))

    def _has_come(self, rank: int) -> bool:
        said = self._said(rank)
        if said in ("", self._left):
            return False
        process, _, place = said.partition(" ")
        if place == _processes_place():
            self._processes[rank] = int(process)
        return True

    def _check_away(self, rank: int) -> None:
        away = _away(self.members[rank])
        if self.talk is None and _store().check([away]):
            why = _store().get(away).decode()
            raise UnsupportedError(f"rank {rank} of group {self.name} takes no part: {why}{self.note}")

    def _check_limit(self, rank: int, waited: float, build: Build | None) -> None:
        """Leaves a rank that runs eagerly what others build, or has raised: it says neither."""
        if build is None or build.function not in _limits_of(self.members[rank]):
            return
        # One that launches has the time to end. One that has raised may launch next, and should find the others there.
        seconds = meeting_seconds(build.watchdog) if build.runs_eagerly else finite_seconds(build.watchdog) / 2
        why = (
            f"rank {rank} of group {self.name} has not come in {seconds:g} s, and has compiled {build.function} as "
            f"often as Dynamo allows{self.note}"
        )
        if waited > seconds and not build.runs_eagerly:
            raise RankLostError(f"{why}. {_REMEDY}")
        if self._said(rank, self._left if waited > seconds else "") == self._left:
            raise LeftError(f"{why}, so no rank runs its own. {_REMEDY}")

    @property
    def _left(self) -> str:
        """Said of a rank that others have left, with the number of PyTorch's exchanges until then. The next one ends
        it: they make that without torch_mpk, and so does the rank."""
        group: Any = self.group  # whose declaration lacks it
        number = 0
        with contextlib.suppress(RuntimeError):  # backends other than gloo and NCCL may not count
            number = group._get_sequence_number_for_group()
        return f"left at {number}"

    def _key(self, rank: int) -> str:
        return f"torch_mpk/{self.name}/{self._num_met}/{rank}"

    def _said(self, rank: int, word: str = "") -> str:
        """Returns what is said of a rank at this meeting, and says ``word`` where nothing has been."""
        store, key = _store(), self._key(rank)
        said = store.get(key).decode() if store.check([key]) else ""
        is_over = said == _GONE or said.startswith("left") and said != self._left
        if word and (is_over or not said):
            return str(store.compare_set(key, said, word).decode())
        return "" if is_over else said

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

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Errors of talk and store are of a rank that is lost."""
        try:
            yield
        except MpkError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from None

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
    """The ranks of the group of that name."""
    team = _teams.get(group)
    if team is None or not team.is_current:
        team = _teams[group] = Team(group)
    return team


def stay_away(why: str) -> None:
    """Has ranks that meet for the first time not wait for this one."""
    _store().set(_away(dist.get_rank()), why)


_limits: set[str] = set()  # functions that Dynamo compiles no more in this process


def tell_limit(function: str) -> None:
    """Has ranks that come to build a function not wait long for this one, whose Dynamo compiles it no more."""
    _limits.add(function)
    _publish_limits()


def forget_limits() -> None:
    """Dynamo begins to count anew."""
    if _limits:
        _limits.clear()
        _publish_limits()


def _publish_limits() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store goes with a process
            _store().set(_limits_key(dist.get_rank()), json.dumps(sorted(_limits)))


def _limits_of(member: int) -> list[str]:
    key = _limits_key(member)
    found: list[str] = json.loads(_store().get(key)) if _store().check([key]) else []
    return found


def _limits_key(member: int) -> str:
    return f"torch_mpk/limits/{member}"


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
