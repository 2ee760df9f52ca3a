"""What the parts of a task's declaration must fulfil, so that they fit its signature and each other."""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_mpk.config import is_int
from torch_mpk.errors import TaskError
from torch_mpk.registry.stream_traits import StreamTraits
from torch_mpk.signature import Operand, pointed

if TYPE_CHECKING:
    from torch_mpk.registry.declaration import Task


# Which the namespace of a task's code cannot be called.
CPP_KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class
    co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
    while xor xor_eq
    """.split()
)


def check_reference(reference: Any, signature: Any) -> None:
    """Raises TaskError unless these are a function with a name, and text."""
    if not isinstance(inspect.unwrap(reference) if callable(reference) else None, types.FunctionType):
        raise TaskError(f"@torch_mpk.task is for functions, the task's reference, not for {reference!r}")
    name = reference.__name__
    if not name.isidentifier():
        raise TaskError(f"{name}: a task needs a function with a name, which the operator gets: define it with def")
    if not isinstance(signature, str):
        raise TaskError(f"{name}: the signature is {signature!r}, expected a string, as 'x[R, H] -> y[R, H]'")


def check_samples(task: Task) -> None:
    """Raises TaskError unless each sample says how large the dimensions of its operands are, and nothing unknown."""
    if not isinstance(task.samples, (list, tuple)) or not all(isinstance(each, Mapping) for each in task.samples):
        raise TaskError(f"{task.name}: samples={task.samples!r}, expected a list of dicts, as [{{'R': 3, 'H': 64}}]")
    dims = {dim for operand in (*task.inputs, *task.outputs) for dim in _sizes(operand)}
    known = [*sorted(dims), *(operand.name for operand in task.inputs), *task.attrs]
    expected = f"expected sizes, attributes and operands' dtypes for {', '.join(known)}"
    for number, sample in enumerate(task.samples):
        where = f"{task.name}: samples[{number}]"
        for key, value in sample.items():
            if key in known and (expected_value := _expected_value(task, key, value)):
                raise TaskError(f"{where}: {key} is {value!r}, expected {expected_value} (signature: {task.signature})")
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                begin = str(dict(sample)).index(repr(key))
                shown = pointed(str(dict(sample)), (begin, begin + len(repr(key))))
                raise TaskError(f"{where} has an unknown key {key!r}{hint}, {expected}{shown}")
        for operand in task.inputs:
            is_given = sample.get(operand.name, operand) is not None
            missing = [dim for dim in _sizes(operand) if dim not in sample] if is_given else []
            if missing:
                shown = pointed(task.signature, operand.place)
                raise TaskError(
                    f"{where} does not say {missing[0]} of {operand.name}, {expected}: {dict(sample)}{shown}"
                )
        for attr in task.attrs.values():
            if attr.required and attr.name not in sample:
                raise TaskError(
                    f"{where} does not say {attr.name}, {expected}: {dict(sample)} (signature: {task.signature})"
                )


def _expected_value(task: Task, key: str, value: Any) -> str | None:
    """What a sample may say of a name, where ``value`` is not that."""
    if key in task.attrs:
        attr = task.attrs[key]
        return None if attr.takes(value) else f"a value of type {attr.type.__name__}"
    if any(operand.name == key for operand in task.inputs):
        return None if value is None or isinstance(value, torch.dtype) else "None or a torch.dtype"
    if key == "...":
        is_shape = isinstance(value, (list, tuple)) and all(is_int(size) and size >= 0 for size in value)
        return None if is_shape else "a tuple of sizes"
    return None if is_int(value) and value >= 0 else "a size"


def _sizes(operand: Operand) -> list[str]:
    """The dimensions that decide what an operand may be, its bound's too."""
    return [dim for dim in (*operand.dims, operand.bound) if dim and not dim.isdigit()]


def read_tile(task: Task, tile: str | Mapping[str, int] | None) -> dict[str, int]:
    """Each dimension that is cut, with the size of a tile in it."""
    if task.role != "tile":
        if tile is not None:
            raise TaskError(f"{task.name}: tile= is for tasks of role 'tile', this one's is {task.role!r}")
        return {}
    written = [operand for operand in (*task.inputs, *task.outputs) if operand.is_write]
    if not written:
        raise TaskError(f"{task.name}: it writes nothing; give it an output, or mark what it updates: 'cache[B, L]!'")
    if tile is None:
        cut = dict.fromkeys((dim for dim in written[-1].dims[:-1] if not dim.isdigit()), 1)
    elif isinstance(tile, str):
        cut = dict.fromkeys(re.findall(r"[^\s,]+", tile), 1)
    elif isinstance(tile, Mapping):
        cut = dict(tile)
    else:
        raise TaskError(f"{task.name}: tile={tile!r}, expected dimensions as 'R' or 'B, H', or a dict of their sizes")
    if any("..." in operand.dims for operand in written):
        cut.setdefault("...", 1)
    for dim, size in cut.items():
        if not is_int(size) or size < 1 or (dim == "..." and size != 1):
            expected = "1" if dim == "..." else "1 or more"
            raise TaskError(f"{task.name}: a tile has {size!r} of dimension {dim}, expected {expected}")
        if not any(dim in operand.dims for operand in task.inputs):
            raise TaskError(
                f"{task.name}: tiles are cut along {dim}, whose size no operand says: cut along dimensions that inputs "
                f"have, too (signature: {task.signature})"
            )
        for operand in written:
            if dim not in operand.dims:
                raise TaskError(
                    f"{task.name}: {operand} is written by every tile along {dim}, but tiles must write different "
                    f"memory: cut along dimensions that all it writes have (signature: {task.signature})"
                )
    names = [*{dim for operand in (*task.inputs, *task.outputs) for dim in operand.dims if not dim.isdigit()}]
    _check_distinct(task.name, [*names, *task.attrs])
    _check_distinct(task.name, [operand.name for operand in (*task.inputs, *task.outputs)])
    return cut


def check_stream(task: Task, stream: str | None) -> str:
    if stream is None:
        return ""
    operand = next((operand for operand in task.inputs if operand.name == stream), None)
    dims = [dim for dim in operand.dims if dim != "..."] if operand else []
    if operand is None or operand.is_write or operand.optional or len(dims) not in (1, 2) or dims[-1] in task.tile:
        raise TaskError(
            f"{task.name}: stream={stream!r}, expected an operand that is read only and always there, a vector or a "
            f"matrix whose last dimension is not cut (signature: {task.signature})"
        )
    if task.role != "tile":
        raise TaskError(f"{task.name}: stream= is for tasks of role 'tile', this one's is {task.role!r}")
    return stream


def check_traits(task: Task, traits: StreamTraits | None) -> StreamTraits:
    """By default the loader may read every input, and waits for what makes it."""
    if traits is None:
        return StreamTraits(loaded=tuple(operand.name for operand in task.inputs) if task.role == "stream" else ())
    only_loaded = task.role == "tile" and traits == StreamTraits(loaded=traits.loaded)
    if task.role != "stream" and not only_loaded:
        raise TaskError(
            f"{task.name}: traits= is for tasks of role 'stream', and loaded of it for role 'tile'; this one's role "
            f"is {task.role!r}"
        )
    unknown = {*traits.operands()} - {operand.name for operand in task.inputs}
    if unknown:
        raise TaskError(f"{task.name}: traits= names {sorted(unknown)}, expected inputs (signature: {task.signature})")
    if traits.cursor and not any(o.name == traits.cursor and o.bound for o in task.inputs):
        raise TaskError(f"{task.name}: the cursor {traits.cursor!r} needs a bound: 'slot[1]: int64 < L'")
    return traits


def _check_distinct(name: str, names: Sequence[str]) -> None:
    """In device code k_cache is KCache, and an attribute or a dimension kKCache."""
    spelled = {"Leading": "...", "T": "T", "Tile": "a tile", "Tiles": "their number", "TileBytes": "a tile's size"}
    spelled |= dict.fromkeys(("StreamT", "StreamRows", "StreamSize", "StreamPitch"), "what is streamed")
    for each in names:
        camel = "".join(part[:1].upper() + part[1:] for part in each.split("_"))
        if each != "..." and camel in spelled:
            raise TaskError(
                f"{name}: {each!r} and {spelled[camel]!r} have one name in device code, {camel}: rename {each!r}"
            )
        spelled[camel] = each
