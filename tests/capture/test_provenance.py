"""Modules and inputs by the names that a user knows them by."""

import pytest
from torch import fx

from torch_mpk.capture.foreign import path_of
from torch_mpk.capture.provenance import module_path, plain_path


@pytest.mark.parametrize("root", ["L['self']", "L['fn']", "L['args'][0]"], ids=["itself", "compiled", "decorated"])
def test_a_module_has_the_model_s_name_for_it(root):
    layer = f"{root}._modules['model']._modules['layers']._modules['0']"
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": (root, fx.GraphModule)}
    assert module_path(node) is None
    node.meta["nn_module_stack"]["inner"] = (layer, fx.GraphModule)
    assert module_path(node) == "model.layers.0"
    assert path_of(f"{layer}._parameters['weight']") == "model.layers.0.weight"


@pytest.mark.parametrize(("source", "name"), [("L['x']", "x"), ("L['args'][0]", "args.0"), ("L['self_']", "self_")])
def test_an_input_has_the_name_of_its_argument(source, name):
    assert plain_path(source) == name
