"""Imports and includes go one way, in the orders below, and importing the package stays light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_mpk import _C
from torch_mpk.registry import tasks

ROOT = Path(__file__).parents[1]

# What torch_mpk/ holds, in the order of imports: a module imports modules before it, and none behind it.
PYTHON_ORDER = """
    errors warn_once config signature plan
    builds registry tasks capture patterns lowering partition planning
    jit runtime dispatch task_kernel verify traces ranks
    backend persistent_kernel mpk generation batching
    continuous_batching serve explain profile generate quantize ops plugins precompile tools
    graph_view testing
    __main__ __init__
""".split()
# The same of the folders of csrc/ and include/torch_mpk/.
CPP_ORDER = "arch graph schedule codegen kernels runtime jit bindings".split()
HOST_SUFFIXES = {".h", ".hpp", ".cpp"}  # a .cuh is device code: only generated kernels include it


def imported_modules(path: Path, with_types: bool = False) -> Iterator[str]:
    """What a file imports of torch_mpk, by the names of what torch_mpk/ holds."""
    return (name.split(".")[1] for name in imported_names(path, with_types) if name.startswith("torch_mpk."))


def imported_names(path: Path, with_types: bool = False) -> Iterator[str]:
    """What a file imports, wherever in the file, by whole names; for types alone where asked for."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parent, *([node.module] if node.module else [])))
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from names


def python_dependencies() -> dict[str, set[str]]:
    """What each module or package directly under torch_mpk imports of the others."""
    top_level = {path.stem for path in (ROOT / "torch_mpk").iterdir() if path.suffix == ".py" or path.is_dir()}
    dependencies: dict[str, set[str]] = {}
    for path in sorted((ROOT / "torch_mpk").rglob("*.py")):
        module = path.relative_to(ROOT / "torch_mpk").parts[0].removesuffix(".py")
        imported = {name for name in imported_modules(path) if name in top_level}
        dependencies.setdefault(module, set()).update(imported - {module})
    return dependencies


def file_dependencies() -> dict[str, set[str]]:
    """What each file imports of the others, but for types; names of both are those of modules."""
    paths = {module_name(path): path for path in sorted((ROOT / "torch_mpk").rglob("*.py"))}
    dependencies = {}
    for module, path in paths.items():
        names = {name if name in paths else name.rpartition(".")[0] for name in imported_names(path)}
        dependencies[module] = {name for name in names if name in paths} - {module}
    return dependencies


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def cpp_dependencies() -> dict[str, set[str]]:
    """What each folder of csrc/ and include/torch_mpk/ includes of the others; files directly in them count as one."""
    dependencies: dict[str, set[str]] = {}
    for base in (ROOT / "csrc", ROOT / "include" / "torch_mpk"):
        for path in base.rglob("*"):
            folder = path.relative_to(base).parts[0]
            if path.suffix not in HOST_SUFFIXES or folder == "bindings.cpp":
                continue
            included = dependencies.setdefault(folder, set())
            for name in re.findall(r'#include "([^"]+)"', path.read_text()):
                if name.startswith("torch_mpk/"):
                    included.add(name.split("/")[1])
                else:
                    included.add((path.parent / name).resolve().relative_to(base).parts[0])
            included.discard(folder)
    return dependencies


def find_cycle(dependencies: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in sorted(dependencies.get(node, ())):
            if cycle := visit(other, [*path, node]):
                return cycle
        done.add(node)
        return None

    for node in sorted(dependencies):
        if cycle := visit(node, []):
            return cycle
    return None


def backward_edges(dependencies: dict[str, set[str]], order: list[str]) -> list[str]:
    rank = {name: i for i, name in enumerate(order)}
    return [
        f"{module} → {other}"
        for module, others in dependencies.items()
        for other in others
        if module in rank and other in rank and rank[other] > rank[module]
    ]


def test_python_imports_go_one_way() -> None:
    dependencies = python_dependencies()
    assert sorted(PYTHON_ORDER) == sorted(dependencies), "PYTHON_ORDER has a place for each of them, and for no other"
    assert backward_edges(dependencies, PYTHON_ORDER) == []
    del dependencies["__init__"]  # gathers the public names
    assert find_cycle(dependencies) is None
    files = file_dependencies()
    del files["torch_mpk"]
    assert find_cycle(files) is None
    users = [module for module, others in dependencies.items() if "testing" in others]
    assert users == ["__main__"], "the product imports torch_mpk.testing; only the command line may, for its models"


def test_few_modules_stand_outside_of_a_folder() -> None:
    """Users import these, or all folders do."""
    assert len([*(ROOT / "torch_mpk").glob("*.py")]) <= 20


@pytest.mark.parametrize("path", sorted((ROOT / "torch_mpk" / "runtime").glob("*.py")), ids=lambda path: path.stem)
def test_the_runtime_knows_no_stage_before_it(path: Path) -> None:
    earlier = {"capture", "patterns", "partition", "lowering", "planning"}
    assert earlier.isdisjoint(imported_modules(path, with_types=True))


def test_cpp_includes_go_one_way() -> None:
    dependencies = cpp_dependencies()
    assert backward_edges(dependencies, CPP_ORDER) == []
    assert find_cycle(dependencies) is None


def test_host_code_includes_neither_torch_nor_cuda_nor_device_code() -> None:
    foreign = re.compile(
        r'#include [<"]((?:torch/|ATen/|c10/|cuda|nvrtc|cooperative_groups|torch_mpk/device/)[^>"]*|[^>"]*\.cuh)'
    )
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for base in (ROOT / "csrc", ROOT / "include" / "torch_mpk")
        for path in sorted(base.rglob("*.*"))
        if path.suffix in HOST_SUFFIXES
        for name in foreign.findall(path.read_text())
    ]
    assert found == []


def test_device_code_reads_of_ours_what_both_sides_share_alone() -> None:
    """And a tile task's header, which is compiled for the CPU as well, what tiles are there."""
    include = ROOT / "include" / "torch_mpk"
    found = [
        f"{path.relative_to(include)}: {name}"
        for folder, allowed in (("device", ("device/", "abi/", "tile.h", "cpu/tile.h")), ("abi", ("abi/",)))
        for path in sorted((include / folder).rglob("*.*"))
        for name in re.findall(r'#include [<"]torch_mpk/([^>"]*)', path.read_text())
        if not name.startswith(allowed)
    ]
    assert found == []


# Where the hand-written tasks and their operands have their names: what they are, and who makes calls of them.
ROOMS = (
    "csrc/codegen/tasks",
    "csrc/cpu/kernels",
    "csrc/kernels/attention",
    "csrc/kernels/collectives",
    "csrc/kernels/experts",
    "csrc/kernels/linear",
    "torch_mpk/tasks",
    "torch_mpk/patterns",
    "torch_mpk/persistent_kernel",
    "torch_mpk/ranks/sharding.py",
)
NAMESAKES = {  # words that mean something else there, or are what transformers calls its own
    "csrc/codegen/program.cpp": {"v"},
    "csrc/jit/bindings.cpp": {"slot"},
    "torch_mpk/continuous_batching.py": {"cu_seq_lens_k", "cu_seq_lens_q", "read_index"},
    "torch_mpk/jit/declaration.py": {"slot"},
    "torch_mpk/jit/expression.py": {"slot"},
    "torch_mpk/jit/kernels.py": {"slot"},
    "torch_mpk/tools/new_kernel.py": {"weight"},
    "torch_mpk/tools/new_task.py": {"weight"},
    "torch_mpk/capture/quantized_inputs.py": {"weight", "bias", "x_scale", "zero"},
    "torch_mpk/jit/samples.py": {"slot"},
    "torch_mpk/serve/text.py": {"length"},
    "torch_mpk/testing/zoo.py": {"linear", "attention"},
}


def test_tasks_are_named_in_their_own_rooms_alone() -> None:
    hand_written = [task for task in tasks() if task.role in ("row", "stream")]
    names = {name for task in hand_written for name in (task.name, *(o.name for o in task.inputs))} - {*_C.op_names()}
    quoted = re.compile(rf'"({"|".join(sorted(names))})"')
    found = {}
    for base in ("csrc", "include", "torch_mpk"):
        for path in sorted((ROOT / base).rglob("*")):
            file = path.relative_to(ROOT).as_posix()
            if path.suffix in (".cpp", ".h", ".cuh", ".py") and not file.startswith(ROOMS):
                found[file] = {*quoted.findall(path.read_text())}
    assert {file: words for file, words in found.items() if words} == NAMESAKES, "general code asks for traits instead"


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """What a file defines behind an underscore, and what it reads or replaces."""
    defined: set[object] = set()
    read: set[object] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name) | ast.alias(name=name):
                read.add(name)
            case ast.Call(args=args):  # setattr's, for one
                read.update(arg.value for arg in args if isinstance(arg, ast.Constant))
    return {str(name) for name in defined if is_private(name)}, {str(name) for name in read if is_private(name)}


def test_tests_leave_private_names_of_modules_that_they_do_not_test_alone() -> None:
    homes: dict[str, set[str]] = {}  # of a private name, the modules and packages that define it
    for path in (ROOT / "torch_mpk").rglob("*.py"):
        for name in private_names(path)[0]:
            homes.setdefault(name, set()).update(path.relative_to(ROOT / "torch_mpk").with_suffix("").parts)
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tested = {part.removeprefix("test_") for part in path.relative_to(ROOT / "tests").with_suffix("").parts}
        defined, read = private_names(path)
        read -= {*dir(torch.Tensor)}
        foreign = [name for name in sorted(read - defined) if name in homes and tested.isdisjoint(homes[name])]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in foreign]
    assert found == []


HEAVY = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "torch_mpk.testing",
    "transformers",
    "triton",
)


def test_import_is_light() -> None:
    """Each of these takes longer to import than torch_mpk itself, and is first needed where something compiles."""
    found = f"[name for name in {HEAVY} if name in sys.modules], torch.cuda.is_initialized()"
    command = [sys.executable, "-c", f"import sys, torch, torch_mpk; print({found})"]
    run = subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True)
    assert run.stdout == "[] False\n"
