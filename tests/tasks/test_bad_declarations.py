"""What is no task: an error that names the argument, where it is declared, taken for a kernel or called."""

import itertools

import pytest
import torch

from torch_mpk import kernel_of, task
from torch_mpk.errors import ArgumentError, SeveralDevicesError, TaskAttributeError, TaskError, UnsupportedError
from torch_mpk.tasks.rms_norm import rms_norm
from torch_mpk.tools import new_task

_numbers = itertools.count()


def declare(signature="x[R, H] -> y[R, H]", **options):
    def reference(x: torch.Tensor, *, eps: float = 1.0) -> torch.Tensor:
        return x + eps

    reference.__name__ = f"bad_declaration_{next(_numbers)}"
    return task(signature, **options)(reference)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"role": "bad"}, "role 'bad' is not one of pointwise, reduce, row, stream, tile"),
        ({"role": None}, "role 'None' is not one of pointwise"),
        ({"signature": 5}, "the signature is 5, expected a string, as 'x"),
        ({"tile": 5}, "tile=5, expected dimensions as 'R' or 'B, H', or a dict"),
        ({"tile": ["R"]}, r"tile=\['R'\], expected dimensions as"),
        ({"tile": {"R": True}}, "a tile has True of dimension R, expected 1 or more"),
        ({"samples": 5}, "samples=5, expected a list of dicts"),
        ({"samples": {"R": 1}}, "samples={'R': 1}, expected a list of dicts"),
        ({"samples": [5]}, r"samples=\[5\], expected a list of dicts"),
        ({"samples": [{"R": "a", "H": 3}]}, r"samples\[0\]: R is 'a', expected a size"),
        ({"samples": [{"R": -1, "H": 3}]}, r"samples\[0\]: R is -1, expected a size"),
        ({"samples": [{"R": 2, "H": 3, "eps": "x"}]}, "eps is 'x', expected a value of type float"),
        ({"samples": [{"R": 2, "H": 3, "x": "float32"}]}, "x is 'float32', expected None or a torch.dtype"),
        ({"header": 5}, "5 is no path of a file, expected a string"),
        ({"cpu": 5}, "5 is no path of a file, expected a string"),
    ],
)
def test_arguments_of_a_declaration(options, match):
    with pytest.raises(TaskError, match=f"^bad_declaration_\\d+: .*{match}"):
        declare(**options)


def test_references_that_are_none():
    def starred(*x: torch.Tensor) -> torch.Tensor: ...

    def annotated(x: "Nothing") -> torch.Tensor: ...  # noqa: F821

    for reference, match in [
        (lambda x: x, "<lambda>: a task needs a function with a name"),
        (5, "@torch_mpk.task is for functions, the task's reference, not for 5"),
        (torch.nn.Linear, "@torch_mpk.task is for functions, .* not for <class"),
        (starred, r"starred: the reference takes \*x, expected its operands and attributes by name"),
        (annotated, "annotated: the annotations of the reference cannot be read: name 'Nothing' is not defined"),
    ]:
        with pytest.raises(TaskError, match=f"^{match}"):
            task("x[R] -> y[R]")(reference)


def test_a_name_that_code_cannot_have(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "double.cuh").touch()
    (tmp_path / "named_double.py").write_text(
        "import torch, torch_mpk\n"
        "@torch_mpk.task('x[R] -> y[R]')\n"
        "def double(x: torch.Tensor) -> torch.Tensor: return 2 * x\n"
    )
    with pytest.raises(TaskError, match="^double: C.. has this word for something else: give the task another name"):
        __import__("named_double")


@pytest.mark.parametrize(
    "value", [lambda x: x, None, "rms_norm", torch.ops.mpk.rms_norm], ids=["lambda", "None", "name", "operator"]
)
def test_what_no_kernel_is_of(value):
    with pytest.raises(TaskError, match="^kernel_of: expected a task, which @torch_mpk.task has declared, got"):
        kernel_of(value)


def test_calls_that_do_not_fit():
    kernel, x, weight = kernel_of(rms_norm), torch.randn(3, 8), torch.ones(8)
    for call in (kernel, rms_norm):
        with pytest.raises(TaskError, match="rms_norm: x is a list, expected a tensor"):
            call([1.0], weight, eps=1e-6, style="llama")
        with pytest.raises(TaskAttributeError, match="rms_norm: eps='small', expected a value of type float"):
            call(x, weight, eps="small", style="llama")
    with pytest.raises(SeveralDevicesError, match=r"\(cpu, meta\): put model and inputs on one"):
        kernel(x, weight.to("meta"), eps=1e-6, style="llama")
    with pytest.raises(UnsupportedError, match="rms_norm: weight and x must both be float64, or neither"):
        kernel(x, weight.double(), eps=1e-6, style="llama")
    torch.testing.assert_close(
        kernel(x, weight, eps=1e-6, style="llama"), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    )


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("rms_norm", "one that no task has"),
        ("scaled_", "nor another's in-place form, which ends in an underscore"),
        ("class", "a name such as a Python function has"),
        ("é", "a name such as a Python function has"),
        ("double", "a name that C.. has for nothing else"),
        ("torch", "one that no module of Python has"),
        ("random", "one that no module of Python has"),
    ],
)
def test_names_of_new_tasks(tmp_path, name, match):
    with pytest.raises(ArgumentError, match=f"^NAME: expected .*{match}.*, got {name}$"):
        new_task.write(name, tmp_path)
    assert not [*tmp_path.iterdir()]
