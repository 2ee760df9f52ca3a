"""torch_mpk/_C.pyi says of the C++ core what its bindings say: every class, member, argument, default and type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from torch_mpk import _C

STUB = ast.parse((Path(__file__).parents[1] / "torch_mpk" / "_C.pyi").read_text())
# What pybind11 calls types that say little; the stub must say more.
VAGUE = {"object", "tuple", "Sequence", "Callable"}
EVERYWHERE = {"__module__", "__doc__", "__new__", "__str__", "__weakref__", "__dict__"}  # a stub need not say so

Parameters = list[tuple[str, str | None, str | None]]  # name, type, default


def plain(text: str) -> str:
    """A type of pybind11's in the stub's words."""
    text = re.sub(r"\b(torch_mpk\._C|collections\.abc|typing)\.", "", text)
    text = text.replace("SupportsInt | SupportsIndex", "int").replace("SupportsFloat | SupportsIndex", "float")
    return text.replace("dict[str, int | float | str]", "_Attrs")


def parameters(function: ast.FunctionDef) -> tuple[Parameters, str]:
    """A function's parameters but ``self``, and the type of its result."""
    spec = function.args
    given = [*spec.args, *filter(None, (spec.vararg, spec.kwarg))]
    defaults = [None] * (len(spec.args) - len(spec.defaults)) + spec.defaults + [None] * 2
    found = [
        (each.arg, each.annotation and ast.unparse(each.annotation), default and ast.unparse(default))
        for each, default in zip(given, defaults, strict=False)
        if each.arg != "self"
    ]
    assert function.returns is not None
    return found, ast.unparse(function.returns)


def described(text: str, name: str) -> ast.FunctionDef:
    """The function of a signature as pybind11 prints it, ``name(...) -> type``."""
    [line] = [line for line in text.splitlines() if line.startswith(f"{name}(")]
    function = ast.parse(plain(f"def {line}: ...")).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def bound_functions(owner: object) -> dict[str, ast.FunctionDef]:
    """What the module, or one of its classes, has: a property is a function without parameters."""
    found = {}
    for name, member in vars(owner).items():
        if isinstance(member, property):
            assert member.fget is not None and member.fget.__doc__ is not None
            found[name] = described(f"{name}() -> {member.fget.__doc__.splitlines()[0].split('-> ')[1]}", name)
        elif f"{name}(" in (getattr(member, "__doc__", None) or "") and "self" in member.__doc__.split(")")[0]:
            found[name] = described(member.__doc__, name)
    return {name: each for name, each in found.items() if name not in EVERYWHERE and not name.startswith("_pybind11")}


def stub_functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    return {each.name: each for each in functions if not any("setter" in ast.unparse(d) for d in each.decorator_list)}


def setters(body: list[ast.stmt]) -> set[str]:
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    return {each.name for each in functions if any("setter" in ast.unparse(d) for d in each.decorator_list)}


CLASSES = {each.name: each for each in STUB.body if isinstance(each, ast.ClassDef) and not each.name.startswith("_")}
BOUND = {name: each for name, each in vars(_C).items() if isinstance(each, type)}


def same(stub: ast.FunctionDef, bound: ast.FunctionDef) -> None:
    declared, result = parameters(stub)
    expected, expected_result = parameters(bound)
    assert [name for name, _, _ in declared] == [
        re.sub(r"^arg0$", declared[i][0], name) for i, (name, _, _) in enumerate(expected)
    ]
    for (name, kind, default), (_, wanted, wanted_default) in zip(declared, expected, strict=True):
        assert kind == wanted or wanted is None or (wanted in VAGUE and kind not in VAGUE), (
            f"{stub.name}: {name} is {kind}, not {wanted}"
        )
        assert default == wanted_default, f"{stub.name}: {name} is {default} by default, not {wanted_default}"
    assert result == expected_result or expected_result in VAGUE, f"{stub.name} returns {expected_result}"


def test_the_stub_has_the_modules_names() -> None:
    assert CLASSES.keys() == BOUND.keys()
    functions = {name for name, each in vars(_C).items() if callable(each) and name not in BOUND}
    assert stub_functions(STUB.body).keys() == functions
    declared = {ast.unparse(each.target) for each in STUB.body if isinstance(each, ast.AnnAssign)}
    constants = {name for name in declared if not name.startswith("_")}  # others are short for types
    assert constants == {name for name, each in vars(_C).items() if not callable(each) and not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(stub_functions(STUB.body)))
def test_functions_take_and_return_what_the_stub_says(name: str) -> None:
    same(stub_functions(STUB.body)[name], described(getattr(_C, name).__doc__, name))


@pytest.mark.parametrize("name", sorted(BOUND))
def test_classes_are_what_the_stub_says(name: str) -> None:
    stub, bound = CLASSES[name], BOUND[name]
    bases = [base.__name__ for base in bound.__bases__ if base.__name__ != "pybind11_object"]
    assert [ast.unparse(base) for base in stub.bases] == bases
    declared, expected = stub_functions(stub.body), bound_functions(bound)
    assert declared.keys() == expected.keys()
    for member, function in declared.items():
        same(function, expected[member])
        is_property = isinstance(vars(bound)[member], property)
        assert is_property == (
            ast.unparse(function.decorator_list[0]) == "property" if function.decorator_list else False
        )
    settable = {member for member, each in vars(bound).items() if isinstance(each, property) and each.fset}
    assert setters(stub.body) == settable


def test_nothing_in_the_stub_is_anything() -> None:
    assert "Any" not in {node.id for node in ast.walk(STUB) if isinstance(node, ast.Name)}
