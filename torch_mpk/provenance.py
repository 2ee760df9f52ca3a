"""Where a node of a captured graph comes from in the user's program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


@dataclass(frozen=True)
class Provenance:
    source: str  # "modeling_llama.py:254: key_states = self.k_proj(hidden_states)", or ""
    module: str  # "layers.0.self_attn.k_proj", or ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.module, self.source)))


def provenance(node: fx.Node) -> Provenance:
    """The innermost source line and module path of a node; empty strings where the capture recorded none."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    source = ""
    if frames:
        path, line, code = frames[-1].groups()
        source = f"{path.rsplit('/', 1)[-1]}:{line}: {code.strip()}"
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = modules[-1][0] if modules else ""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)  # L['self']._modules['layers'] -> L.self._modules.layers
    path = path.replace("._modules", "").removeprefix("L.").removeprefix("self").lstrip(".")
    return Provenance(source, path)
