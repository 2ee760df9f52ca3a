"""Dynamo compiles a function up to ``torch._dynamo.config.recompile_limit`` times. It calls no backend after that, and
says nothing."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext

from torch_mpk.capture.graph import source_line
from torch_mpk.warn_once import warn


class Function(NamedTuple):
    """A function that Dynamo compiles.

    Attributes:
        name: with its file. What follows a graph break is a part of it.
        is_whole: whether it has to be one graph (``fullgraph``). Then calls raise that would need another compile.
    """

    name: str
    is_whole: bool


def being_compiled() -> Function | None:
    if CompileContext.current_compile_id() is None:
        return None
    root = _root()
    part = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_\d+", root.f_code.co_name)
    name = part[1] if part else root.f_code.co_name
    is_whole = root.one_graph or torch._dynamo.config.fail_on_recompile_limit_hit
    return Function(f"{name} in {root.f_code.co_filename}", bool(is_whole))


def is_last_compile() -> bool:
    """Whether Dynamo allows no more compiles of the function that it compiles."""
    return _num_compiled() == torch._dynamo.config.recompile_limit - 1


def warn_of_last_compile(gm: torch.fx.GraphModule) -> None:
    limit = torch._dynamo.config.recompile_limit
    place = next(filter(None, map(source_line, gm.graph.nodes)), "a function")
    warn(
        f"{place} has been compiled {limit} times, all that Dynamo allows: calls with yet other shapes or arguments "
        "will run eagerly, or raise with fullgraph=True. TORCH_LOGS=recompiles says what differs from call to call. "
        "Keep max_cache_len and the batch the same, do not pass dynamic=False, or allow more compiles: "
        f"torch._dynamo.config.recompile_limit = {8 * limit}"
    )


def _num_compiled() -> int | None:
    """How often the function that Dynamo compiles has been compiled, as its limit counts: what was compiled for a model
    that is gone does not count, nor, where ``torch.compile`` isolates calls from each other, what is another's."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None:
        return None
    try:
        from torch._dynamo.eval_frame import _get_cache_entries_for_region, get_eval_frame_isolate_recompiles_id
    except ImportError:  # before PyTorch 2.13
        return compile_id.frame_compile_id
    return len(_get_cache_entries_for_region(_root().f_code, get_eval_frame_isolate_recompiles_id()))


def _root() -> Any:
    """Dynamo's translator of the function itself, not of those that it calls."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.root_tx
