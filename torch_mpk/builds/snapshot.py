"""What Python objects hold, noted so that it can be put back: a model's attributes, buffers and parameters."""

from __future__ import annotations

import itertools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch

# Whose objects keep what is no model's: streams, locks, loggers, compilers.
_OTHERS = sys.stdlib_module_names - {"collections", "types"} | {"torch", "torch_mpk"}


class Snapshot:
    """The attributes and elements of all objects that ``roots`` lead to, as they are now.

    Modules and Python's containers are followed, objects of classes that are neither PyTorch's nor the standard
    library's, and what functions close over or name among their globals.

    Attributes:
        tensors: those met on the way, parameters included.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._held: list[tuple[Any, list[Any]]] = []
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        seen: dict[int, Any] = {}  # by id; with the objects themselves, so that no id has two meanings
        rest = list(roots)
        while rest:
            obj = rest.pop()
            if id(obj) not in seen:
                seen[id(obj)] = obj
                rest += self._visit(obj)

    def _visit(self, obj: Any) -> Iterable[Any]:
        """Notes what an object holds; what it leads to."""
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        elif isinstance(obj, torch.Generator):
            self._states.append((obj, obj.get_state()))
        elif isinstance(obj, _HOLDERS):
            held = _held_by(obj)
            self._held.append((obj, held))
            yield from held
        yield from _led_to(obj)

    def restore(self) -> None:
        """Makes the objects hold what they held. What still does is not touched."""
        for obj, held in self._held:
            now = _held_by(obj)
            if len(now) != len(held) or not all(map(is_, now, held)):
                _hold(obj, held)
        for generator, state in self._states:
            generator.set_state(state)


_HOLDERS = (dict, list, deque, set, types.CellType)


def _held_by(obj: Any) -> list[Any]:
    """Keys and values in turns, elements, or a cell's content."""
    if isinstance(obj, dict):
        return [*itertools.chain.from_iterable(_base(obj).items(obj))]
    if isinstance(obj, types.CellType):
        try:
            return [obj.cell_contents]
        except ValueError:  # it is empty
            return []
    return [*obj]


def _hold(obj: Any, held: list[Any]) -> None:
    if isinstance(obj, dict):
        base = _base(obj)
        base.clear(obj)
        for key, value in zip(held[::2], held[1::2], strict=True):
            base.__setitem__(obj, key, value)
    elif isinstance(obj, types.CellType):
        del obj.cell_contents
        if held:
            [obj.cell_contents] = held
    else:
        obj.clear()
        obj.update(held) if isinstance(obj, set) else obj.extend(held)


def _base(obj: dict[Any, Any]) -> Any:
    """The class whose methods do nothing else, whatever those of a class derived from it do."""
    return OrderedDict if isinstance(obj, OrderedDict) else dict


def _led_to(obj: Any) -> Iterator[Any]:
    if isinstance(obj, (tuple, frozenset)):
        yield from obj
    elif isinstance(obj, partial):
        yield from (obj.func, obj.args, obj.keywords)
    elif isinstance(obj, types.MethodType):
        yield from (obj.__self__, obj.__func__)
    elif isinstance(obj, types.FunctionType):
        if _package(obj) not in _OTHERS:
            yield from obj.__closure__ or ()
            yield from (obj.__globals__[name] for name in obj.__code__.co_names if name in obj.__globals__)
    elif not isinstance(obj, (type, types.ModuleType)):
        attributes = getattr(obj, "__dict__", None)
        if attributes is not None and (isinstance(obj, torch.nn.Module) or _package(type(obj)) not in _OTHERS):
            yield attributes


def _package(obj: Any) -> str:
    return str(obj.__module__).partition(".")[0]
