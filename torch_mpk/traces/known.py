"""Traces that may serve a call: those of this process, and then those that earlier ones have left on the disk."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch_mpk.traces import store
from torch_mpk.traces.trace import Trace

logger = logging.getLogger(__name__)

MAX_KINDS = 16  # of calls whose traces are kept
MAX_TRACES = 4  # of each kind

_kept: OrderedDict[Hashable, list[Trace]] = OrderedDict()
_lock = threading.Lock()  # of these; held for moments only


def forget() -> None:
    """As ``torch.compiler.reset()`` asks for it; what is in use stays so."""
    with _lock:
        _kept.clear()


def are_kept(kind: Hashable) -> bool:
    """Whether this process has traces of a kind."""
    with _lock:
        return bool(_kept.get(kind))


def find(
    kind: Hashable,
    local: Mapping[str, Any],
    looked_up: set[Hashable] | None,
    make: Callable[[Trace, Mapping[str, Any]], Callable[..., Any]],
) -> Trace | None:
    """A trace that holds for a call with these locals.

    Args:
        kind: of all traces that may; equal in every process.
        looked_up: kinds for which the caller has looked on the disk; this one joins them. None: it is not looked at,
            which may wait for other threads that trace.
        make: gives what runs the graph of a trace that comes from there.
    """
    with _lock:
        candidates = iter(list(_kept.get(kind, ())))
    if looked_up is not None and kind not in looked_up:
        looked_up.add(kind)
        candidates = itertools.chain(candidates, store.stored(kind))
    for trace in candidates:
        different = trace.difference(local)
        if different is not None:
            logger.debug("a trace does not serve: %s", different)
            continue
        if not hasattr(trace, "call"):  # from the disk
            trace.call = make(trace, local)
        keep(kind, trace)
        return trace
    return None


def publish(kind: Hashable, trace: Trace) -> None:
    """Gives others a trace, in this process and later ones: what it does has turned out to be right."""
    keep(kind, trace)
    store.store(kind, trace)


def keep(kind: Hashable, trace: Trace) -> None:
    with _lock:
        traces = _kept.setdefault(kind, [])
        traces[:] = [trace, *(each for each in traces if each is not trace)][:MAX_TRACES]
        _kept.move_to_end(kind)
        if len(_kept) > MAX_KINDS:
            _kept.popitem(last=False)
