"""Hugging Face's continuous batching with each step one launch: see docs/serving.md.

The engine of transformers schedules requests, keeps their pages, samples and streams. Importing this module registers
an attention for it, under the name ``ATTENTION``: a step is a graph without a break, with one token of each request, or
with chunks of prompts beside such tokens. ``config`` has backend mpk compile both.
"""

# ruff: noqa: E402 - the version comes first

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from torch_mpk import _C
from torch_mpk.errors import EngineError, MissingPackageError, OtherAttentionError
from torch_mpk.warn_once import warn

MIN_TRANSFORMERS = "5.23"
try:
    from transformers import __version__ as _found
except ImportError:
    _found = ""
if not _found or [int(part) for part in _found.split(".")[:2]] < [int(part) for part in MIN_TRANSFORMERS.split(".")]:
    raise MissingPackageError(name=__name__, package="transformers", version=MIN_TRANSFORMERS, found=_found or "none")

from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import find_head_dim

from torch_mpk.batching import engine
from torch_mpk.batching.cache import Cache
from torch_mpk.batching.compiled_step import is_own
from torch_mpk.batching.engine import StepCompileConfig
from torch_mpk.tasks.attention import Scores, attend
from torch_mpk.tasks.paged_attention import paged_attention

# "flash" says that it needs no masks; what is no name of transformers' own must look like a repository's to its server.
ATTENTION = "torch_mpk/flash"
WITH_SINKS = "kernels-community/vllm-flash-attn3"  # which models list whose attention differs by sinks alone
MAX_ROWS = 64  # requests of a step; more are bound by arithmetic


def config(
    options: Mapping[str, Any] | None = None, *, compile_prompts: bool = True, **settings: Any
) -> ContinuousBatchingConfig:
    """For ``model.generate_batch(..., continuous_batching_config=config())``, of a model with attention ``ATTENTION``.

    Args:
        options: of backend mpk, as in ``torch.compile(model, backend="mpk", options=options)``.
        compile_prompts: run steps with prompts as launches, too; False leaves them to eager PyTorch.
        settings: of ``transformers.ContinuousBatchingConfig``, by its names and with its defaults, but for
            ``max_requests_per_batch``, which is 64, and, on a GPU, ``use_cuda_graph``, which is for decode steps
            alone.
    """
    ours: dict[str, Any] = {
        "max_requests_per_batch": MAX_ROWS,
        "decode_compile_config": StepCompileConfig(options=dict(options or {})),
    }
    if compile_prompts:
        ours["varlen_compile_config"] = StepCompileConfig(options=dict(options or {}))
    if torch.cuda.is_available():
        ours["use_cuda_graph"] = (False, True)  # of prompts, the engine captures one for each length of the longest
    return ContinuousBatchingConfig(**ours | settings)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    *,
    scaling: float | None = None,
    cache: Cache | None = None,
    block_table: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **lengths: Any,
) -> tuple[torch.Tensor, None]:
    """What a model calls for attention in the engine. ``query`` [1, heads, tokens, size], ``key`` and ``value`` with
    fewer heads, and a result [1, tokens, heads, size]. With ``block_table`` each token is a request's next one. Scores
    lie within ``softcap``, and ``s_aux`` [heads] are sinks: scores of a key that there is not."""
    engine.note_attention()
    name = type(module).__name__
    if cache is None:
        return _refuse(f"it is for generate_batch and `transformers serve`, whose cache {name} does not pass to it")
    scale, cap = query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0
    is_eager = is_own()
    if block_table is None and (is_eager or not torch.compiler.is_compiling()):  # nothing looks at how a tuple is made
        return _attend_eagerly(module, query, key, value, Scores(scale, cap, s_aux), cache, **lengths), None
    allocator = cache.layer_to_allocator[module.layer_idx]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    ends = lengths["cu_seq_lens_k"][allocator.layer_type]
    if block_table is None:
        k_cache, v_cache = _cache_rows(cache, allocator, module.layer_idx)
        read_index, write_index = (lengths[name][allocator.index] for name in ("read_index", "write_index"))
        window = lengths.get("sliding_window") or 0
        y = torch.ops.mpk.varlen_attention(
            *(q, k, v, k_cache, v_cache, read_index, lengths["cu_seq_lens_q"], ends, s_aux),
            scale=scale,
            window=window,
            softcap=cap,
        )
        # Behind it: where a window's keys go round, new ones take the places of such as the first new tokens see.
        k_cache.index_copy_(0, write_index, k)
        v_cache.index_copy_(0, write_index, v)
        return y.unsqueeze(0), None
    table = block_table[allocator.index] // (2 * len(allocator.layer_indices))  # which counts pages of all layers
    pages, lengths_k = _pages(allocator, module.layer_idx), ends[1:] - ends[:-1]
    if is_eager:  # the operator would be built for each number of rows
        most = -(-int(lengths_k.max()) // allocator.tokens_per_page)
        y = paged_attention(q, k, v, *pages, table[:, :most], lengths_k, s_aux, scale=scale, softcap=cap)
        return y.unsqueeze(0), None
    y = torch.ops.mpk.paged_attention(q, k, v, *pages, table, lengths_k, s_aux, scale=scale, softcap=cap)
    return y.unsqueeze(0), None


@torch.compiler.assume_constant_result
def _refuse(what: str) -> NoReturn:
    """Dynamo calls this as it is; an error that it traces loses its message."""
    raise EngineError(what)


def _pages(allocator: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's pages of keys and of values, [pages, page size, heads, size].

    They are views of one tensor that has all layers' in turns: the graph makes them, so that it has one input to write.
    No two of them meet, and all layers' have equal shapes: then one layer's code serves all, and none awaits another's
    writes.
    """
    every = allocator.cache_tensor  # [tokens, 2, heads, size], of all layers
    layers = allocator.layer_indices
    pages = every.view(-1, 2 * len(layers), allocator.tokens_per_page, *every.shape[2:])
    first = 2 * layers.index(layer)
    return pages[:, first], pages[:, first + 1]


def _cache_rows(cache: Cache, allocator: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and its values, [rows, heads, size], as the engine's indices count them: from the layer's first
    page on, other layers' between them. As many of each layer of an allocator.

    Allocators have views of one memory; all layers' rows are of the first one's, so that the graph has one input to
    write.
    """
    every = next(iter(cache.cache_allocators.values())).cache_tensor  # [tokens, 2, heads, size], of all layers
    rows, page, layers = every.flatten(0, 1), allocator.tokens_per_page, allocator.layer_indices
    count = rows.shape[0] - (2 * len(layers) - 1) * page
    first = 2 * layers.index(layer) * page
    return rows[first : first + count], rows[first + page : first + page + count]


def _attend_eagerly(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    cache: Cache,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **lengths: Any,
) -> torch.Tensor:
    """Of requests with any number of new tokens each, one behind the other. ``lengths`` is what the cache takes."""
    key, value = cache.write(key, value, module.layer_idx, lengths)
    cu_seq_lens_k, max_length_k = lengths["cu_seq_lens_k"], lengths["max_length_k"]
    is_pytorchs = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and scores.are_plain
    attend_to_all = varlen_attention() if is_pytorchs else None
    if attend_to_all is not None:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        bounds = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return attend_to_all(q, k, v, *bounds, scale=scores.scale, window_size=window).unsqueeze(0)
    y = torch.zeros_like(query)
    ends = zip(cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist())
    for (q_begin, k_begin), (q_end, k_end) in itertools.pairwise(ends):
        if q_begin < q_end:
            q, k, v = query[:, :, q_begin:q_end], key[:, :, k_begin:k_end], value[:, :, k_begin:k_end]
            y[:, :, q_begin:q_end] = _attend_to_one(q, k, v, scores, sliding_window)
    return y.transpose(1, 2)


@functools.cache
def varlen_attention() -> Callable[..., torch.Tensor] | None:
    """PyTorch's attention of sequences one behind the other, with heads in groups; None where it takes no scale or no
    window."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    if "enable_gqa" in known:
        result: Any = functools.partial(varlen_attn, enable_gqa=True)
        return result

    def with_repeated_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch 2.11 needs them."""
        k, v = (t.repeat_interleave(q.shape[-2] // t.shape[-2], -2) for t in (k, v))
        return varlen_attn(q, k, v, *args, **kwargs)

    return with_repeated_heads


def _attend_to_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, window: int | None
) -> torch.Tensor:
    """Of the last tokens of one request, ``q``, to all up to each: [1, heads, tokens, size]."""
    num_new, length = q.shape[2], k.shape[2]
    if scores.are_plain and window is None and num_new in (1, length):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scores.scale, is_causal=num_new > 1)
    reach = torch.arange(length - num_new, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    mask = (reach >= 0) & (reach < (window or length))
    return attend("the engine: key", q, k, v, mask, None, scores, "sdpa")


def _why_prompts_are_not_ours(model_config: Any) -> str | None:
    """What keeps steps with prompts from being launches; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    dtype, size = model_config.dtype, find_head_dim(model_config)
    major, minor = torch.cuda.get_device_capability()
    arch = _C.arch_of_device(10 * major + minor)
    if arch is None or not arch.has_warpgroup_products:
        return "that takes a GPU of compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {dtype}, and that takes bfloat16 or float16"
    return (
        None if size % 8 == 0 and size <= 256 else f"heads are of size {size}, and that takes multiples of 8 up to 256"
    )


def _prepare(model_config: Any, cb_config: ContinuousBatchingConfig) -> None:
    """Decides which steps are compiled: without a configuration, as of `transformers serve`, as ``config`` says.

    Raises EngineError where the model's weights are shared out to several ranks.
    """
    ranks = getattr(getattr(model_config, "distributed_config", None), "tp_size", None) or 1
    if ranks > 1:
        raise EngineError(
            f"the model's weights are shared out to {ranks} ranks, whose engines would not make the same steps at the "
            "same time; torch_mpk.generate takes such a model"
        )
    # ``config`` always has the one, and the other unless prompts are to be eager.
    takes_prompts = cb_config.varlen_compile_config is not None or cb_config.decode_compile_config is None
    types = initialization.group_layers_by_attn_type(model_config)
    if any(not initialization.ATTN_TYPE_TO_ALLOCATOR[each].supports_block_table for each in types):
        cb_config.max_blocks_per_request = 0  # every step is one of prompts
    elif cb_config.decode_compile_config is None:
        cb_config.decode_compile_config = StepCompileConfig()
    has_others = bool(cb_config.max_blocks_per_request)
    if takes_prompts:
        why_not = _why_prompts_are_not_ours(model_config)
        if why_not is None and cb_config.varlen_compile_config is None:
            cb_config.varlen_compile_config = StepCompileConfig()
    else:  # as was asked for, but of a model that has no other steps
        why_not = None if has_others else "config(compile_prompts=False) says so"
    if why_not is not None:
        steps = "prompts" if has_others else "every step, of which none takes block tables,"
        warn(f"torch_mpk runs {steps} of continuous batching eagerly: {why_not}")
        cb_config.varlen_compile_config = None


def _has_our_steps(cb_config: ContinuousBatchingConfig) -> bool:
    return StepCompileConfig in map(type, (cb_config.decode_compile_config, cb_config.varlen_compile_config))


def _round_cache_sizes() -> None:
    """Has caches that take what memory is left be of few sizes: six leading bits, so they lose a 32nd at most.

    A step's graph has the cache's size. What is left differs a little from start to start, and each would build anew.
    """
    infer = PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors

    @functools.wraps(infer)
    def infer_of_few(self: PagedAttentionMemoryHandler) -> tuple[int, int]:
        max_batch_tokens, num_sectors = infer(self)
        if self.cb_config.num_blocks is None and _has_our_steps(self.cb_config):
            dropped = max(num_sectors.bit_length() - 6, 0)
            num_sectors = num_sectors >> dropped << dropped
        return max_batch_tokens, num_sectors

    PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors = infer_of_few


def _register() -> None:
    """Makes transformers know the attention.

    Two of its functions would otherwise look for a package of flash attention's, or a GPU: whether the engine may take
    its path of one token a request, and what a model loads before it is called. A third would give models with sinks
    another attention, since they list those that compute them.
    """
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: kwargs.get("attention_mask"))
    load, ensure = modeling_utils.lazy_import_flash_attention, initialization.ensure_decode_fast_path_is_available
    adjust = modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(load)
    def load_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == ATTENTION else load(implementation, *args, **kwargs)

    @functools.wraps(ensure)
    def ensure_for_others(model_config: Any, cb_config: ContinuousBatchingConfig, *args: Any, **kwargs: Any) -> None:
        found = model_config._attn_implementation
        if found == ATTENTION:
            return _prepare(model_config, cb_config)
        if _has_our_steps(cb_config):
            raise OtherAttentionError(found=found)
        return ensure(model_config, cb_config, *args, **kwargs)

    @functools.wraps(adjust)
    def adjust_others(self: Any, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        takes_sinks = WITH_SINKS in (self._compatible_flash_implementations or ())
        return (
            ATTENTION if takes_sinks and implementation == ATTENTION else adjust(self, implementation, *args, **kwargs)
        )

    modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation = adjust_others
    modeling_utils.lazy_import_flash_attention = load_others
    initialization.ensure_decode_fast_path_is_available = ensure_for_others
    engine.install(ATTENTION)


_round_cache_sizes()
_register()
