"""The gated activations of MLPs."""

from __future__ import annotations

from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, argument, aten, dtype, is_call, is_tensor, shape, swapped
from torch_mpk.patterns.table import pattern


@pattern(aten.mul.Tensor)
def gated(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    for activated, up in swapped(node.args):
        if not is_call(activated, aten.silu.default, aten.gelu.default) or not is_tensor(up):
            continue
        gate = activated.args[0]
        if shape(gate) != shape(up) or None in shape(up) or dtype(gate) != dtype(up):
            continue
        rw.see(node, activated)
        if is_call(activated, aten.silu.default):
            return rw.task("silu_mul", gate, up)
        return rw.task("gelu_mul", gate, up, approximate=argument(activated, "approximate"))
    return None
