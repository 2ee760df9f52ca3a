"""A graph, or a part of one, that torch_mpk does not take runs as the user chose, announced once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import lookup_backend

from torch_mpk.admission import Declined
from torch_mpk.config import Options
from torch_mpk.errors import MpkError, MpkWarning, UnsupportedError
from torch_mpk.partition import Partitioned

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def check_coverage(partitioned: Partitioned, options: Options) -> None:
    """Raises UnsupportedError unless everything is ours, or what is not may run eagerly between our segments."""
    if not partitioned.fallbacks:
        return
    node, source, why = partitioned.fallbacks[0]
    error = UnsupportedError(why, str(node), source)
    if options.fallback != "eager" or not any(s.ours for s in partitioned.segments):
        raise error
    others = len(partitioned.fallbacks) - 1
    warn(f"torch_mpk runs a part of this graph eagerly: {error}" + (f" (and {others} more nodes)" if others else ""))


def fall_back(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, error: Exception
) -> Callable[..., Any]:
    """What runs a graph that we do not: eager PyTorch, or what the user chose."""
    if isinstance(error, Declined) and error.is_intended:
        logger.info("%s", error)
        return gm.forward
    if options.fallback == "error":
        raise error
    reason = str(error) if isinstance(error, MpkError) else f"{type(error).__name__}: {error}"
    if options.fallback == "inductor":
        warn(f"torch_mpk leaves this graph to inductor: {reason}")
        return lookup_backend("inductor")(gm, list(inputs))
    warn(f"torch_mpk runs this graph eagerly: {reason}")
    logger.info("the error behind the warning", exc_info=error)
    return gm.forward


def warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, MpkWarning, stacklevel=2)
