"""What docs/coming-from.md says there is here, is here."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_mpk
from torch_mpk import PersistentKernel
from torch_mpk.__main__ import arguments_parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
HEADERS = "".join(path.read_text() for path in (ROOT / "include" / "torch_mpk").rglob("*.*h"))
JIT = (ROOT / "docs" / "jit.md").read_text()
SOURCES = "".join(path.read_text() for path in (ROOT / "torch_mpk").rglob("*.py"))


def resolves(name: str) -> bool:
    try:
        functools.reduce(getattr, name.split(".")[1:], torch_mpk)
    except AttributeError:
        return False
    return True


def is_command(text: str) -> bool:
    with pytest.raises(SystemExit) as exit_:
        arguments_parser().parse_args([*text.split()[3:], "--help"])
    return exit_.value.code == 0


def takes(argument: str, cell: str) -> bool:
    function = functools.reduce(getattr, cell.split("`torch_mpk.")[1].split("`")[0].split("."), torch_mpk)
    return argument.rstrip("=") in inspect.signature(function).parameters


# How each kind of name is looked up, by the first pattern that it matches; the cell says whose an argument is.
KINDS: list[tuple[str, Callable[[str, str], bool]]] = [
    (r"torch_mpk\.[\w.]+", lambda name, _: resolves(name)),
    (r"torch\.ops\.mpk_jit", lambda name, _: '"mpk_jit"' in SOURCES),
    (r"pk\.\w+", lambda name, _: callable(getattr(PersistentKernel, name[3:], None))),
    (r"python -m torch_mpk \S+", lambda name, _: is_command(name)),
    (r"\w+=", takes),
    (r"TORCH_MPK_\w+", lambda name, _: name in SOURCES),
    (r"include/\S+", lambda name, _: (ROOT / name).is_file()),
    (r"[46]\.\w+\.\w+", lambda name, _: f'"{name}"' in SOURCES),
    (
        r"(mpk::|Threads::|threads\.|kSharedBytes|compute|tile\.)\S*",
        lambda name, _: re.search(rf"\b{re.escape(name.removeprefix('mpk::'))}\b", HEADERS) is not None,
    ),
    (r'torch\.compile\(model, backend="mpk"\)', lambda name, _: True),  # which all other tests call
    # The grammars of signatures and launches, which docs/jit.md explains, and plain CUDA.
    (r"(x\[|-> |<|\{|cdiv|kernel<<<|kernel\(|blockIdx|N$|V$|_$).*", lambda name, _: True),
]


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
def test_every_name_here_exists(heading: str) -> None:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[2].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for cell in rows:
        for name in re.findall(r"`([^`]+)`", cell):
            looked_up = next((found for pattern, found in KINDS if re.fullmatch(pattern, name)), None)
            assert looked_up is not None, f"no way to look up {name!r}"
            assert looked_up(name, cell), f"{name!r} is not there"


@pytest.mark.parametrize("name", ["torch_mpk.nothing", "pk.nothing", "mpk::kNothing", "TORCH_MPK_NOTHING"])
def test_a_name_that_does_not_exist_is_seen(name: str) -> None:
    looked_up = next(found for pattern, found in KINDS if re.fullmatch(pattern, name))
    assert not looked_up(name, f"`{name}`")


def scaled(x, y=None):
    """A kernel of one tensor or two."""


@pytest.mark.parametrize(
    ("signature", "launch"),
    [
        ("x[N]: T=float32|float16 -> y[N]: T", "scaled<T><<<cdiv(N, 1024), 256>>>(x, y, N)"),
        ("x[M, K; S, 1]: float32, y[M, K]!: float32", "scaled<<<M, 256>>>({.x = x, .y = y, .n = K})"),
    ],
)
def test_spellings_of_signatures_and_launches_are_accepted(signature: str, launch: str) -> None:
    """As the tables of mllm-kernel and Triton have them, put together."""
    function = scaled if signature.count("y[") and "!" in signature else lambda x: None
    function.__name__ = "scaled"
    kernel = torch_mpk.jit.kernel("__global__ void scaled() {}", signature, launch)(function)
    assert isinstance(kernel, torch_mpk.jit.Kernel)


def test_mirages_import_with_one_word_changed() -> None:
    from torch_mpk.mpk.persistent_kernel import PersistentKernel as Imported

    assert Imported is PersistentKernel
    code = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert code
    names: dict[str, object] = {}
    exec(code[1], names)
    assert isinstance(names["pk"], PersistentKernel)
