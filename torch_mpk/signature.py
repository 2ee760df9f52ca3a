"""The signatures of tasks and kernels: ``x[M, K; S, 1]?: T=float32|bfloat16, ids[M]: int64 < V -> y[M]: T``."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from torch_mpk import _C
from torch_mpk.errors import MpkError, TaskError

DTYPES: tuple[str, ...] = _C.DTYPES  # that operands may have

# In a text with one space between words. What stands in the brackets is read by itself.
_TENSOR = re.compile(
    r"(?P<name>[A-Za-z_]\w*) ?\[(?P<sizes>[^\[\];]*)(?P<strides>;[^\[\]]*)?\]( ?(?P<marks>[?!~]+))?"
    r"( ?: ?(?P<dtypes>(\w+ ?= ?)?\w+( ?\| ?\w+)*)( ?< ?(?P<bound>\w+))?)?"
)
_BITS = re.compile(r"(8|16|32|64)$")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One tensor of a signature, as in ``k_cache[B, G, L, D]!`` or ``ids[...]: int64 < V``."""

    name: str
    dims: tuple[str, ...]  # named ("B"), literal ("1"), computed ("M // 2"), or "...": any number of leading dimensions
    strides: tuple[str, ...]  # of each dimension a name, a number, an expression or "_" for any; none: not said
    optional: bool  # "?": may be None
    is_read: bool
    is_write: bool  # an output, or "!": updated in place
    is_scratch: bool  # "~": an output that is not returned
    dtypes: tuple[str, ...]  # that are accepted
    dtype_name: str | None  # a name for the one it has
    bound: str | None  # integers below this dimension's size are meaningful
    place: tuple[int, int]  # where it stands in the text

    def __str__(self) -> str:
        strides = f"; {', '.join(self.strides)}" if self.strides else ""
        return f"{self.name}[{', '.join(self.dims)}{strides}]{'?' if self.optional else ''}"

    @property
    def dtype(self) -> torch.dtype | None:
        """None: one of several."""
        return getattr(torch, self.dtypes[0]) if len(self.dtypes) == 1 else None

    @property
    def has_leading(self) -> bool:
        return self.dims[:1] == ("...",)

    def dims_of(self, rank: int) -> tuple[str, ...]:
        """The dimensions of a tensor of that rank: "..." stands for as many as there are."""
        return ("...",) * (rank - len(self.dims) + 1) + self.dims[1:] if self.has_leading else self.dims


class Signature:
    """What a text says about the tensors of ``owner``, a task or a kernel.

    One of a task has outputs, if none behind the "->", and may have bounds; one of a kernel may have no "->", and
    strides, computed sizes, "~" and dtypes that have names or are several.

    Raises ``error``, with the text and the place in it that cannot be read.
    """

    def __init__(self, owner: str, text: str, error: type[MpkError], *, is_kernel: bool = False) -> None:
        self.owner, self.text, self.error, self.is_kernel = owner, " ".join(text.split()), error, is_kernel
        arrows = [match.span() for match in re.finditer("->", self.text)]
        if len(arrows) > 1:
            self._fail("there is more than one '->'", arrows[1])
        if not arrows and not is_kernel:
            self._fail("the signature needs one '->' between inputs and outputs", (0, len(self.text)))
        end, begin = arrows[0] if arrows else (len(self.text), len(self.text))
        self.inputs = [*self._operands(0, end, is_output=False)]
        self.outputs = [*self._operands(begin, len(self.text), is_output=True)]

    def _fail(self, what: str, place: tuple[int, int]) -> NoReturn:
        raise self.error(f"{self.owner}: {what}{pointed(self.text, place)}")

    def _operands(self, begin: int, end: int, is_output: bool) -> Iterator[Operand]:
        begin = self._skip_space(begin, end)
        while begin < end:
            match = _TENSOR.match(self.text, begin, end)
            if match is None:
                self._cannot_read(begin, end)
            yield self._operand(match, is_output)
            begin = self._skip_space(match.end(), end)
            if begin < end:
                following = self._skip_space(begin + 1, end)
                if self.text[begin] != "," or following == end:
                    self._cannot_read(begin, end)
                begin = following

    def _skip_space(self, begin: int, end: int) -> int:
        return end - len(self.text[begin:end].lstrip())

    def _cannot_read(self, begin: int, end: int) -> NoReturn:
        rest = self.text[begin:end].rstrip()
        is_open = rest.count("[") > rest.count("]")
        hint = ": a bracket is not closed" if is_open else ""
        place = begin + (rest.index("[") if is_open else 0), begin + len(rest)
        self._fail(f"cannot read {rest!r}{hint}; write tensors as 'x[M, K]: float32'", place)

    def _operand(self, match: re.Match[str], is_output: bool) -> Operand:
        name, marks = match["name"], match["marks"] or ""
        strides: tuple[str, ...] = ()
        dims = self._extents(name, "dimension", *match.span("sizes"))
        if match["strides"]:
            strides = self._extents(name, "stride", match.start("strides") + 1, match.end("strides"))
        if match["strides"] and not self.is_kernel:
            self._fail(f"{name} has strides, which are for kernels alone", match.span("strides"))
        if strides and ("..." in dims or len(strides) != len(dims)):
            self._fail(f"{name} needs as many strides as sizes, and no '...'", match.span("strides"))
        if is_output and (strides or marks.strip("~" * self.is_kernel)):
            but = " but '~'" * self.is_kernel
            self._fail(f"{name} is allocated by the call: it is contiguous and has no marks{but}", match.span())
        if "~" in marks and not is_output:
            what = "what is allocated and not returned, behind '->'" if self.is_kernel else "kernels alone"
            self._fail(f"{name}: '~' is for {what}", match.span("marks"))
        if match["bound"] and self.is_kernel:
            self._fail(f"{name} has a bound, which is for tasks alone", match.span("bound"))
        dtype_name, dtypes = self._dtypes(name, *match.span("dtypes")) if match["dtypes"] else (None, DTYPES)
        return Operand(
            name=name,
            dims=dims,
            strides=strides,
            optional="?" in marks,
            is_read=not is_output,
            is_write=is_output or "!" in marks,
            is_scratch="~" in marks,
            dtypes=dtypes,
            dtype_name=dtype_name,
            bound=match["bound"],
            place=match.span(),
        )

    def _extents(self, name: str, kind: str, begin: int, end: int) -> tuple[str, ...]:
        """Sizes or strides, as an expression's text has them."""
        extents: list[str] = []
        for word in self._split(",", begin, end):
            is_plain = word.text.isidentifier() or word.text.isdecimal() or word.text == "..."
            if word.text.isdecimal() and int(word.text) >= 2**63:
                self._fail(f"{name} has a {kind} {word.text} beyond 64 bits", word.place)
            expression = _expression(word.text) if self.is_kernel else None
            if not is_plain and expression is None:
                others = ", a number or '...'" if not self.is_kernel else ", a number, or an expression of them"
                self._fail(f"{name} has a {kind} {word.text!r}, expected a name{others}", word.place)
            if word.text == "..." and (extents or kind == "stride"):
                self._fail(f"{name}: '...' can only stand first, among sizes", word.place)
            extents.append(word.text if is_plain else str(expression))
        return tuple(extents)

    def _dtypes(self, name: str, begin: int, end: int) -> tuple[str | None, tuple[str, ...]]:
        """The name of a dtype, and which it may be."""
        *named, choices = self._split("=", begin, end)
        words = self._split("|", *choices.place)
        if not self.is_kernel and (named or len(words) > 1):
            self._fail(f"{name} has dtype {self.text[begin:end]!r}; an operand of a task has one, or any", (begin, end))
        if self.is_kernel and not named and len(words) == 1 and _is_variable(words[0].text):
            return words[0].text, DTYPES
        for word in named:
            if _dtype(word.text):
                self._fail(f"{name} has dtype {word.text!r} as a name; write T={choices.text}", word.place)
        for word in words:
            if not _dtype(word.text):
                hint = "".join(
                    f"; did you mean {close!r}?" for close in difflib.get_close_matches(word.text, DTYPES, n=1)
                )
                self._fail(f"{name} has dtype {word.text!r}; the dtypes are {', '.join(DTYPES)}{hint}", word.place)
        return named[0].text if named else None, tuple(_dtype(word.text) for word in words)

    def _split(self, separator: str, begin: int, end: int) -> list[_Word]:
        """What stands between separators, but for those in parentheses."""
        words, depth, first = [], 0, begin
        for i in range(begin, end + 1):
            c = self.text[i] if i < end else separator
            depth += {"(": 1, ")": -1}.get(c, 0)
            if i == end or (c == separator and not depth):
                text = self.text[first:i].strip()
                place = self.text.index(text, first)
                words.append(_Word(text, (place, place + len(text))))
                first = i + 1
        if not words[-1].text:  # nothing, or a comma at the end
            words.pop()
        return words


class _Word(NamedTuple):
    text: str
    place: tuple[int, int]


def pointed(text: str, place: tuple[int, int]) -> str:
    """The text, on a line of its own, and under it what points to the place."""
    begin, end = place
    return f"\n    {text}\n    {' ' * begin}{'^' * max(end - begin, 1)}"


def _expression(text: str) -> str | None:
    """As Python writes it; None for what is none."""
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError):
        return None


def _dtype(word: str) -> str:
    """The dtype that a word names, perhaps by another of torch's names for it (``half``); empty for none."""
    name = str(getattr(torch, word, None)).removeprefix("torch.")
    return name if name in DTYPES else ""


def _is_variable(word: str) -> bool:
    """Whether a word is a name for any dtype, and not meant for one of them: ``T``, but not ``long`` or ``float33``."""
    is_dtype = isinstance(getattr(torch, word, None), torch.dtype)
    return not is_dtype and not difflib.get_close_matches(word, DTYPES, cutoff=0.8) and not _BITS.search(word)


def draw(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", below: int | None = None
) -> torch.Tensor:
    """Random elements for an operand: normal ones, or integers from 0 to ``below``, by default small ones."""
    if dtype == torch.bool:
        return torch.rand(tuple(shape), device=device) < 0.5
    if not dtype.is_floating_point:
        least, end = (-127, 128) if dtype == torch.int8 and below is None else (0, 8 if below is None else below)
        return torch.randint(least, end, tuple(shape), device=device).to(dtype)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32  # so that float64 has all of its digits
    return torch.randn(tuple(shape), dtype=drawn, device=device).to(dtype)


def bind_dims(
    name: str,
    signature: str,
    operands: Sequence[Operand],
    shapes: Sequence[Sequence[int] | None],
    sizes: dict[str, tuple[Any, str]],
) -> dict[str, tuple[Any, str]]:
    """Bind the operands' named dimensions to sizes, on top of ``sizes``; raises TaskError where one disagrees."""
    for operand, shape in zip(operands, shapes, strict=True):
        if shape is None:
            if not operand.optional:
                raise TaskError(f"{name}: {operand.name} is required (signature: {signature})")
            continue
        dims, tail = operand.dims, list(shape)
        if operand.has_leading:
            dims, num_leading = dims[1:], len(tail) - len(dims) + 1
            leading, tail = tuple(tail[: max(num_leading, 0)]), tail[max(num_leading, 0) :]
            _bind(name, signature, operand, "...", leading, sizes)
        if len(dims) != len(tail):
            expected = f"{'at least ' * operand.has_leading}{len(dims)} dimension{'s' * (len(dims) != 1)}"
            raise TaskError(
                f"{name}: {operand.name} has shape {tuple(shape)}, expected {expected}: {operand} "
                f"(signature: {signature})"
            )
        for dim, size in zip(dims, tail, strict=True):
            _bind(name, signature, operand, dim, size, sizes)
    return sizes


def _bind(name: str, signature: str, operand: Operand, dim: str, size: Any, sizes: dict[str, tuple[Any, str]]) -> None:
    expected, by = (int(dim), "the signature") if dim.isdigit() else sizes.setdefault(dim, (size, operand.name))
    if size != expected:
        raise TaskError(
            f"{name}: {operand.name} has {dim}={size}, but {dim}={expected} was bound by {by} (signature: {signature})"
        )
