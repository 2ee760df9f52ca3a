"""Rows of a table."""

from __future__ import annotations

import torch
from torch import fx

from torch_mpk.patterns.rewriter import Rewriter, aten, dtype, shape
from torch_mpk.patterns.table import pattern


@pattern(aten.embedding.default)
def embedding(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    weight, ids = node.args[:2]
    if dtype(ids) != torch.int64 or None in shape(node):
        return None
    rw.see(node)
    return rw.task("embedding", ids, weight)
