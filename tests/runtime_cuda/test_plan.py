"""What stages 4 to 6 hand over."""

import pytest
import torch

from torch_mpk import planning
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options
from torch_mpk.dispatch.compiled_graph import build_segment
from torch_mpk.plan import pack, unpack
from torch_mpk.registry import get
from torch_mpk.runtime import cuda
from torch_mpk.testing.tasks import Calls, samples_of

LINEAR = Calls(samples_of([get("linear")], torch.bfloat16)[:1]).gm


def test_a_kernel_that_was_kept_has_all_fields_of_one_that_was_made(fake):
    target = cuda.target(torch.device("cuda", 0), Options())
    kernel = planning.make_plan(LINEAR, target, Options(), Dump(None)).kernel
    kept = unpack(pack(kernel))
    fields = [name for name in dir(kernel) if not name.startswith("_")]
    assert {name: getattr(kept, name) for name in fields} == {name: getattr(kernel, name) for name in fields}


def test_what_nobody_asked_to_see_is_not_written(monkeypatch, tmp_path):
    device = torch.device("cpu")
    monkeypatch.setattr(planning._C.TBGraph, "to_json", lambda graph: pytest.fail("nobody asked for it"))
    build_segment(LINEAR, device, Options(), Dump(None))
    with pytest.raises(pytest.fail.Exception, match="nobody asked"):
        build_segment(LINEAR, device, Options(), Dump(tmp_path))
