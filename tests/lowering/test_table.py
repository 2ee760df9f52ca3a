"""The table of rules, and what every rule in it keeps to."""

import ast
from pathlib import Path

import pytest
import torch

from torch_mpk import lowering
from torch_mpk.lowering.table import RULES

RULES_FOLDER = Path(lowering.__file__).parent / "rules"


@pytest.mark.parametrize("path", sorted(RULES_FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_no_rule_asks_a_node_for_its_target(path: Path) -> None:
    """It may be the in-place form of what the rule is for: a comparison that fails would pass for something else."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("target", "_schema")), (
            f"{path.name}:{node.lineno} decides by a node's target: give `rule` a mapping that says what each target is"
        )


def test_every_rule_is_for_an_operator() -> None:
    assert all(isinstance(target, torch._ops.OpOverload) for target in RULES)
