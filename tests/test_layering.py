"""Imports and includes go one way, as docs/architecture.md says, and importing the package stays light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = " ".join((ROOT / "docs" / "architecture.md").read_text().split())


def stages(sentence: str) -> list[str]:
    """The names in one sentence of the architecture page, in the order it gives them."""
    match = re.search(sentence, ARCHITECTURE)
    assert match, f"docs/architecture.md no longer says: {sentence}"
    return [name for group in match[1].split("→") for name in re.findall(r"\w+", group)]


PYTHON_STAGES = stages(r"Python imports go one way: ([^.]*)\.")
CPP_STAGES = stages(r"The C\+\+ core goes ([^.]*?), and never includes")
HOST_SUFFIXES = {".h", ".hpp", ".cpp"}  # a .cuh is device code: only generated kernels include it


def imported_modules(path: Path) -> Iterator[str]:
    """torch_mpk's modules that a file imports, wherever in the file, but not those imported for types alone."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
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
        yield from (name.split(".")[1] for name in names if name.startswith("torch_mpk."))


def python_dependencies() -> dict[str, set[str]]:
    """What each module or package directly under torch_mpk imports of the others."""
    top_level = {path.stem for path in (ROOT / "torch_mpk").iterdir() if path.suffix == ".py" or path.is_dir()}
    dependencies: dict[str, set[str]] = {}
    for path in sorted((ROOT / "torch_mpk").rglob("*.py")):
        module = path.relative_to(ROOT / "torch_mpk").parts[0].removesuffix(".py")
        imported = {name for name in imported_modules(path) if name in top_level}
        dependencies.setdefault(module, set()).update(imported - {module})
    return dependencies


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
    assert backward_edges(dependencies, PYTHON_STAGES) == []
    del dependencies["__init__"]  # gathers the public names
    assert find_cycle(dependencies) is None
    users = [module for module, others in dependencies.items() if "testing" in others]
    assert users == ["__main__"], "the product imports torch_mpk.testing; only the command line may, for its models"


def test_cpp_includes_go_one_way() -> None:
    dependencies = cpp_dependencies()
    assert backward_edges(dependencies, CPP_STAGES) == []
    assert find_cycle(dependencies) is None


def test_host_code_includes_neither_torch_nor_cuda_nor_device_code() -> None:
    foreign = re.compile(r'#include [<"]((?:torch/|ATen/|c10/|cuda|nvrtc|cooperative_groups)[^>"]*|[^>"]*\.cuh)')
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for base in (ROOT / "csrc", ROOT / "include" / "torch_mpk")
        for path in sorted(base.rglob("*.*"))
        if path.suffix in HOST_SUFFIXES
        for name in foreign.findall(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "unwanted",
    ["torch.cuda.is_initialized()", "'transformers' in sys.modules", "'torch._inductor.compile_fx' in sys.modules"],
)
def test_import_is_light(unwanted: str) -> None:
    script = f"import sys, torch, torch_mpk; sys.exit({unwanted})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)
