"""Where a node of a captured graph comes from in the user's program."""

from __future__ import annotations

import re

from torch import fx

from torch_mpk.capture.graph import source_line

# The model, called as itself or through a wrapper: torch.compile's, or a decorator's around ``forward``.
_ROOT = re.compile(r"^L\.((self|fn|args\.0)\.)?")
_HOLDERS = re.compile(r"\._(modules|parameters|buffers)(?=\[)")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")


def module_path(node: fx.Node) -> str | None:
    """The innermost module of the user's model that ``node`` runs in, as "model.layers.0.self_attn.k_proj"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return None
    return plain_path(stack[-1][0] + ".").rstrip(".") or None


def plain_path(source: str) -> str:
    """Dynamo's path of a module, parameter or argument as the model has it: of "L['self'].layers[0]" "layers.0"."""
    return _ROOT.sub("", _INDEX.sub(r".\1", _HOLDERS.sub("", source)))


def where(node: fx.Node) -> str | None:
    """Source line and module path of a node; None where the capture recorded neither."""
    return ", ".join(filter(None, (source_line(node), module_path(node)))) or None
