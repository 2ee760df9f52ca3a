"""gptqmodel's linears: of GPTQ and AWQ checkpoints, as transformers loads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_mpk.capture.quantized_modules import product, take

_IN_ORDER = "mpk_columns_are_in_order"  # an attribute, since Dynamo has guards for these


def take_linears(package: Any) -> None:
    """All classes of linears that gptqmodel's folder of them has or will have."""
    base = getattr(package, "BaseQuantLinear", None)
    if base is None:
        return

    def take_class(cls: Any) -> None:
        if "post_init" in vars(cls):
            _note_order(cls)
        if "forward" in vars(cls):
            refuses, of_words = _GPTQMODEL.get(cls.__name__, (_has_own_order, None))
            take(cls, functools.partial(refuses, cls), of_words)

    def derive(cls: Any, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        take_class(cls)

    base.__init_subclass__ = classmethod(derive)
    for cls in _below(base):
        take_class(cls)


def _note_order(cls: Any) -> None:
    """Has a class's modules know whether groups are runs of columns, whenever their weights have been loaded."""
    known = cls.post_init

    @functools.wraps(known)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        known(self, *args, **kwargs)
        if getattr(self, "g_idx", None) is not None:
            if not hasattr(self, _IN_ORDER):
                self.register_load_state_dict_post_hook(_look_at_order)
            _look_at_order(self)

    cls.post_init = post_init


def _look_at_order(module: Any, *_: Any) -> None:
    groups = module.g_idx
    columns = torch.arange(len(groups), dtype=groups.dtype, device=groups.device)
    setattr(module, _IN_ORDER, torch.equal(groups, columns // module.group_size))


def _below(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _has_own_order(cls: Any, module: Any) -> str:
    backend = "torch_awq" if "awq" in cls.__name__.lower() else "torch"
    return f"its kernel has its words in an order of its own; backend={backend!r} keeps the checkpoint's"


def _refuses_words(cls: Any, module: Any) -> str:
    if type(module) is not cls:
        return "it is derived from a class that is known, and may store something else"
    if module.bits != 4 or module.pack_dtype != torch.int32:
        return f"it has {module.bits} bits in {module.pack_dtype}, expected 4 in torch.int32"
    if module.in_features % 8:
        return f"it has {module.in_features} columns, expected a multiple of 8"
    if module.training:
        return "it is being trained"
    if module.adapter is not None:
        return "it has an adapter"
    return ""


def _refuses_gptq(cls: Any, module: Any) -> str:
    why = _refuses_words(cls, module)
    if not why and (module.online_full_had or module.online_partial_had):
        return "it rotates activations before the product"
    if not why and module.g_idx.shape[0] != module.in_features:
        return "it is several linears in one"
    return why


def _gptq(self: Any, x: Tensor) -> Tensor:
    """Eight numbers of neighbouring columns are a word, and eight zero points of neighbouring rows. g_idx says each
    column's group, unless it is known that groups are neighbours."""
    groups = None if not self.desc_act and getattr(self, _IN_ORDER, False) else self.g_idx
    operands = self.qweight.t(), self.scales.t(), self.bias, None, self.qzeros.t(), groups
    return product(x, self.out_features, *operands, block_rows=1, block_columns=self.group_size)


def _awq(self: Any, x: Tensor) -> Tensor:
    """Eight numbers of neighbouring rows are a word, and eight zero points, in AWQ's order."""
    operands = self.qweight.t(), self.scales.t(), self.bias, None, self.qzeros.t()
    return product(x, self.out_features, *operands, block_rows=1, block_columns=self.group_size)


# By the class's name: what speaks against a module, and its product.
_GPTQMODEL: dict[str, tuple[Callable[[Any, Any], str], Callable[[Any, Tensor], Tensor] | None]] = {
    "AwqGEMMLinear": (_refuses_words, _awq),
    "AwqGEMMTritonLinear": (_refuses_words, _awq),
    "AwqTorchLinear": (_refuses_words, _awq),
    "TorchLinear": (_refuses_gptq, _gptq),
    "TritonV2Linear": (_refuses_gptq, _gptq),
}
