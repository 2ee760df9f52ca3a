"""Compiling before the first call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_mpk.builds.dry_run import dry_run
from torch_mpk.config import Options


def precompile(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """Builds all that ``torch.compile(model, backend="mpk", options=options)(*args, **kwargs)`` needs.

    Calls like this one then only launch, be they of the result or of another ``torch.compile`` of the model with the
    same options. On CUDA a later process finds the kernels in the cache (``TORCH_MPK_CACHE_DIR``), even where
    ``TORCH_MPK_FORBID_COMPILE`` forbids it to compile. Call it for each batch size and kind of mask, in
    ``inference_mode`` or ``no_grad`` as the calls will be; the default is ``inference_mode``.

    The call is made, so that errors of a launch show here, but leaves everything as it was, also where it raises. It
    gets deep copies of its arguments, but for modules and what cannot be copied. Buffers and other tensors that the
    model holds are restored, as are parameters that a graph writes: until it returns it takes memory for one copy of
    all these. Attributes, and elements of lists and dicts, are afterwards the objects that they were, and random state
    is what it was. The device must be there: a kernel is made for its number of multiprocessors.

    Args:
        model: a module or function, compiled already or not.
        options: of the backend.

    Returns:
        the compiled model.

    Raises:
        OptionError: an option has an unknown name or a value that cannot be used.
        Exception: whatever the call itself raises; with ``options={"fallback": "error"}``, what would have been a
            fallback.
    """
    Options.parse(None, options)
    fn = getattr(model, "_orig_mod", model)
    compiled = torch.compile(fn, backend="mpk", options=None if options is None else dict(options))
    mode = torch.inference_mode() if torch.is_grad_enabled() else contextlib.nullcontext()
    with mode, dry_run(fn, args, kwargs, is_compiled=True) as (copied_args, copied_kwargs):
        compiled(*copied_args, **copied_kwargs)
    return compiled
