"""Integer expressions of a declaration: sizes, requirements and the numbers of a launch, read as Python's."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

_OPS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_FUNCTIONS = ("cdiv", "min", "max")
_FORMS = (
    "names of sizes, strides, and int and bool parameters, integers, + - * // %, "
    f"{', '.join(f'{name}(a, b)' for name in _FUNCTIONS)} and numel(x)"
)

# "constant" or "slot" and which, "and", "or", "if" or "skip" and how many they skip, or an operation.
Instruction = tuple[str, int]

_EVALUATE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "cdiv": lambda a, b: -(-a // b),
    "min": torch.sym_min,
    "max": torch.sym_max,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Expression:
    text: str
    code: tuple[Instruction, ...]  # postfix

    @property
    def slots(self) -> set[int]:
        """Of the names it has."""
        return {operand for op, operand in self.code if op == "slot"}

    def evaluate(self, values: dict[int, Any]) -> Any:
        """With the values of slots; sizes may be symbolic where there are no conditions."""
        stack: list[Any] = []
        skip = 0
        for op, operand in self.code:
            if skip:
                skip -= 1
            elif op in ("constant", "slot"):
                stack.append(values[operand] if op == "slot" else operand)
            elif op == "not":
                stack.append(not stack.pop())
            elif op in ("if", "skip"):
                skip = 0 if op == "if" and stack.pop() else operand
            elif op in ("and", "or"):
                if bool(stack[-1]) == (op == "or"):
                    skip = operand
                else:
                    stack.pop()
            else:
                b = stack.pop()
                stack.append(_EVALUATE[op](stack.pop(), b))
        return stack[0]


@dataclass(frozen=True)
class Scope:
    """What names stand for; both raise for those that stand for nothing. ``place`` is for messages."""

    integer: Callable[[str], int]  # the slot of a name
    numel: Callable[[str], int | None]  # the slot of a tensor's number of elements
    fail: Callable[[str], NoReturn]
    place: str = "the launch"
    has_conditions: bool = False

    def read(self, node: ast.expr) -> Expression:
        return Expression(ast.unparse(node), tuple(self._code(node)))

    def parse(self, text: str) -> Expression:
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            self.fail(f"cannot read {text!r} in {self.place}: it may have {self._forms}")
        return self.read(node)

    @property
    def _forms(self) -> str:
        conditions = ", compared by == != < <= > >=, these joined by and, or, not, and a if condition else b"
        return _FORMS + conditions * self.has_conditions

    def _code(self, node: ast.expr) -> Iterator[Instruction]:
        text = ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            if not -(2**63) <= node.value < 2**63:
                self.fail(f"'{text}' is beyond 64 bits")
            yield "constant", int(node.value)
        elif isinstance(node, ast.Name):
            yield "slot", self.integer(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from (("constant", 0), *self._code(node.operand), (_OPS[ast.Sub], 0))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPS:
            yield from (*self._code(node.left), *self._code(node.right), (_OPS[type(node.op)], 0))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            yield from self._call(node.func.id, node.args, text)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            self.fail(f"'{text}' is not an integer: write // or cdiv(a, b)")
        elif self.has_conditions and isinstance(node, ast.IfExp):
            chosen, other = tuple(self._code(node.body)), tuple(self._code(node.orelse))
            yield from (*self._code(node.test), ("if", len(chosen) + 1), *chosen, ("skip", len(other)), *other)
        elif self.has_conditions and isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield from self._condition(node, text)
        else:
            self.fail(f"cannot read '{text}' in {self.place}: it may have {self._forms}")

    def _condition(self, node: ast.Compare | ast.BoolOp | ast.UnaryOp, text: str) -> Iterator[Instruction]:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from (*self._code(node.operand), ("not", 0))
        elif isinstance(node, ast.BoolOp):
            yield from self._joined(
                "and" if isinstance(node.op, ast.And) else "or", [tuple(self._code(value)) for value in node.values]
            )
        elif isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
            sides = [tuple(self._code(side)) for side in (node.left, *node.comparators)]
            pairs = zip(sides, sides[1:], node.ops, strict=False)
            yield from self._joined("and", [(*a, *b, (_COMPARISONS[type(op)], 0)) for a, b, op in pairs])
        else:
            self.fail(f"cannot read '{text}' in {self.place}: it may have {self._forms}")

    @staticmethod
    def _joined(op: str, sides: list[tuple[Instruction, ...]]) -> tuple[Instruction, ...]:
        """The first side that decides skips the others, as in Python: ``N == 0 or M % N == 0``."""
        *before, code = sides
        for side in reversed(before):
            code = (*side, (op, len(code)), *code)
        return code

    def _call(self, function: str, arguments: list[ast.expr], text: str) -> Iterator[Instruction]:
        if function in _FUNCTIONS and len(arguments) == 2:
            yield from (*self._code(arguments[0]), *self._code(arguments[1]), (function, 0))
            return
        slot = self.numel(ast.unparse(arguments[0])) if function == "numel" and len(arguments) == 1 else None
        if slot is None:
            known = f"{', '.join(f'{name}(a, b)' for name in _FUNCTIONS)} and numel(x)"
            self.fail(
                f"cannot read '{text}' in {self.place}: the functions are {known} of a tensor that is always given"
            )
        yield "slot", slot
