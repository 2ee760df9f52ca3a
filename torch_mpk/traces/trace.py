"""What Dynamo found in one trace, in a form that outlives it: for other engines, model objects and processes.

A trace is Dynamo's graph, where each of its inputs is found, and what Dynamo has looked at on the way, its guards. Each
guard has a place, an expression such as ``L['model']._modules['lm_head']``; a *fact* is what is found there, in words
that mean the same in another process: the value of a number or a string, the class of an object and the names of its
attributes, the length of a list, the keys of a dict. Functions and classes are described by name and by their code, so
that another version of a model's file, or a function put in place of one, is another fact. Sizes are no facts: they
satisfy what Dynamo has asked of their symbols. A trace holds for a call whose places say the same; what cannot be said
so is not kept, and is Dynamo's as ever.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import importlib
import itertools
import operator
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_mpk.capture.graph import input_sources

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, slice)
_STATES = {  # guards without a place, of what ``state`` says
    "GRAD_MODE",
    "DETERMINISTIC_ALGORITHMS",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "DEFAULT_DEVICE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "SHAPE_ENV",  # which is ``Layouts``
    "FSDP_TRAINING_STATE",
}


# Guards of a value: that it equals what it was; and those of which ``describe`` says as much as they ask, or more.
_OF_VALUES = {"CONSTANT_MATCH", "EQUALS_MATCH"}
_OF_OBJECTS = {
    *("TYPE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "MODULE_MATCH", "NN_MODULE"),
    *("NONE_MATCH", "BOOL_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT", "EMPTY_NN_MODULE_HOOKS_DICT"),
    *(
        "SEQUENCE_LENGTH",
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_CONST_KEYS",
        "MAPPING_KEYS_CHECK",
        "SET_CONTAINS",
        "SET_NOT_CONTAINS",
    ),
    *("TENSOR_MATCH", "DUPLICATE_INPUT", "WEAKREF_ALIVE", "DISPATCH_KEY_SET_MATCH"),
}
# Of what an object's name says which one it is.
_NAMED = (type(None), bool, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType)


# What finding a value raises where there is none.
_ELSEWHERE = (AttributeError, KeyError, IndexError, TypeError, ImportError)


class UntoldError(Exception):
    """A guard, or a value, that no fact can stand for."""


# ---- facts ----


def describe(value: Any) -> Any:
    """What a guard may have looked at in a value, equal in every process where it is the same.

    Raises UntoldError.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _name(type(value)), str(value.dtype), str(value.device), value.requires_grad, value.is_inference()
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type):
        return "class", _name(value), _code_of_class(value)
    if isinstance(value, types.FunctionType):
        return "function", _name(value), _code_of(value)
    if isinstance(value, types.MethodType):
        return "method", _name(value), describe(value.__func__)
    if isinstance(value, dict):
        return describe(type(value)), tuple(map(_key, value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return describe(type(value)), len(value)
    if callable(value) and hasattr(value, "__qualname__"):  # what is built in
        return "builtin", _name(value)
    attributes = getattr(value, "__dict__", {})
    return describe(type(value)), tuple(sorted(map(str, attributes)))


def describe_value(value: Any) -> Any:
    """All of a constant's value. Raises UntoldError where it is none."""
    if isinstance(value, (enum.Enum, range)):
        return _name(type(value)), repr(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, types.CodeType):
        return "code", _digest(value)
    if type(value) in (list, tuple, torch.Size, set, frozenset):
        parts = tuple(map(describe_value, value))
        return type(value).__name__, tuple(sorted(parts)) if isinstance(value, (set, frozenset)) else parts
    raise UntoldError(f"a constant of class {_name(type(value))}")


def _key(key: Any) -> Any:
    return repr(key) if isinstance(key, _PLAIN) else describe(key)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


def _is_known(name: str | None) -> bool:
    """Whether a module is PyTorch's or Python's, whose code their versions say."""
    import sys

    package = str(name).partition(".")[0]
    return package in ("torch", "builtins") or package in sys.stdlib_module_names


def _code_of_class(cls: type) -> str:
    """Of a class and those that it is made of, but for PyTorch's and Python's."""
    return _code_of_class_now(cls, tuple(_functions(cls)))


@functools.lru_cache(1024)
def _code_of_class_now(cls: type, functions: tuple[tuple[str, Any], ...]) -> str:
    digest = hashlib.sha256()
    for name, function in functions:
        digest.update(f"{name} {_code_of(function)}".encode())
    return digest.hexdigest()


def _functions(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if _is_known(base.__module__):
            continue
        for name, value in sorted(vars(base).items()):
            for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
                if isinstance(function, types.FunctionType):
                    yield f"{base.__qualname__}.{name}", function


def _code_of(function: types.FunctionType) -> str:
    """Of a function, and of those that it closes over, as decorators do."""
    if _is_known(function.__module__):
        return ""
    closure = tuple(cell for cell in function.__closure__ or () if _filled(cell))
    inner = [cell.cell_contents for cell in closure]
    of_inner = [_code_of(each) for each in inner if isinstance(each, types.FunctionType) and each is not function]
    defaults = [repr(value) for value in function.__defaults__ or () if isinstance(value, _PLAIN)]
    return hashlib.sha256(repr((_digest(function.__code__), of_inner, defaults)).encode()).hexdigest()


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@functools.lru_cache(8192)
def _digest(code: types.CodeType) -> str:
    constants = [repr(describe_value(each)) for each in code.co_consts]  # of which sets have no order
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, sorted(constants)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def state() -> tuple[Any, ...]:
    """What Dynamo guards of the process and the thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        len(torch.overrides._get_current_function_mode_stack()),
        str(torch.utils._device.CURRENT_DEVICE),
    )


class _Globals(dict[str, Any]):
    """What a trace's places may name: a module's globals, and others by the names that Dynamo gives them."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        if name.startswith("__import_"):
            return importlib.import_module(name.removeprefix("__import_").replace("_dot_", "."))
        return vars(importlib.import_module(self._module))[name]


def _own_names_of_modules(output: Any) -> dict[str, str]:
    """Names that one compilation of Dynamo's has given to modules, and those by which every process finds them."""
    found = {name: output.global_scope.get(name) for name in output.installed_globals}
    return {
        name: "__import_" + value.__name__.replace(".", "_dot_")
        for name, value in found.items()
        if isinstance(value, types.ModuleType)
    }


def _names() -> dict[str, Any]:
    """Names that places use beside ``L`` and ``G``."""
    from torch._dynamo import guards  # whose import takes a second

    find: Callable[[], dict[str, Any]] = getattr(guards, "_get_closure_vars", dict)
    return dict(find())


@functools.lru_cache(64)
def _finder(places: tuple[str, ...]) -> Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Any, ...]]:
    """What finds the values at places."""
    found: Any = eval(f"lambda L, G: ({''.join(f'{place}, ' for place in places)})", _names())
    return found


def _place(guard_or_source: Any) -> str:
    name = guard_or_source.name
    result: str = name() if callable(name) else name  # as in earlier versions of PyTorch
    return result


def _presence(source: Any) -> str:
    """An expression that says whether there is an attribute."""
    if not hasattr(source, "member"):  # an attribute of a module, in a source that says so
        source = source.base
    return f"hasattr({_place(source.base)}, {source.member!r})"


# ---- sizes ----


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tensor's, of which some numbers are expressions of symbols."""

    dtype: torch.dtype
    device: torch.device
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        sizes, strides = (tuple(map(_expression, dims)) for dims in (tensor.size(), tensor.stride()))
        return cls(tensor.dtype, tensor.device, sizes, strides)

    @property
    def numbers(self) -> tuple[Any, ...]:
        return (*self.size, *self.stride)

    @property
    def is_static(self) -> bool:
        return all(isinstance(n, int) for n in self.numbers)


def _expression(n: int | torch.SymInt) -> Any:
    return n if isinstance(n, int) else n.node.expr


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What must hold of the tensors and numbers of a call, by their places."""

    tensors: dict[str, Layout]
    numbers: dict[str, Any]  # symbols
    conditions: tuple[Any, ...]
    ranges: dict[Any, tuple[Any, Any]]
    hints: dict[Any, int]  # what the symbols were in the call that was traced

    def difference(self, layouts: Sequence[Layout], numbers: Sequence[int]) -> str | None:
        """Where a call's tensors, and the numbers that its symbols are, are others than these; None: nowhere."""
        known: dict[Any, int] = dict(zip(self.numbers.values(), numbers, strict=True))
        for (place, expected), found in zip(self.tensors.items(), layouts, strict=True):
            is_like = (expected.dtype, expected.device) == (found.dtype, found.device)
            if not is_like or len(expected.size) != len(found.size):
                return place
            for n, actual in zip(expected.numbers, found.numbers, strict=True):
                if not isinstance(n, int) and n.is_Symbol:
                    known.setdefault(n, actual)
                if (n if isinstance(n, int) else n.xreplace(known)) != actual:
                    return f"{place}: {found.size}, {found.stride}, not {expected.size}, {expected.stride}"
        for symbol, (low, high) in self.ranges.items():
            if symbol in known and not low <= known[symbol] <= high:
                return f"{symbol}, which is {known[symbol]} and must be in [{low}, {high}]"
        return next((str(condition) for condition in self.conditions if not condition.xreplace(known)), None)


# ---- traces ----


class Trace:
    """One of Dynamo's, of a function that changes nothing but tensors, in place, and returns the graph's results.

    Attributes:
        gm: Dynamo's graph.
        inputs: the places of its inputs.
        objects: what ``describe`` says of what is found at places, by the places.
        values: the same of ``describe_value``.
        state: see ``state``.
        same: numbers of objects, and of tensors, by their places: equal where these are one.
        module: whose globals the function names.
        call: runs the graph on its inputs; whoever makes a trace sets it.
    """

    call: Callable[..., Any]

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[str],
        objects: Mapping[str, Any],
        values: Mapping[str, Any],
        sizes: Sizes,
        same: Mapping[str, int],
        module: str,
    ) -> None:
        self.gm, self.inputs, self.sizes, self.same = gm, tuple(inputs), sizes, dict(same)
        self.module = module
        self.objects, self.values, self.state = dict(objects), dict(values), state()
        self._tensors, self._numbers = tuple(sizes.tensors), tuple(sizes.numbers)
        self._same_tensors = _numbered([self.same[place] for place in self._tensors])
        self._fitting: set[Any] = set()
        self._names: dict[str, Any] = {}  # functions, classes and modules that were as they should be, by their places

    def difference(self, local: Mapping[str, Any]) -> str | None:
        """The first place where a call with these locals is another than the one that was traced; None: it is alike."""
        return self._differing(self.objects, self.values, local) or self.difference_of_call(local)

    def difference_of_call(self, local: Mapping[str, Any]) -> str | None:
        """The same, for locals of which the model is known to be alike."""
        if self.state != state():
            return "the modes that PyTorch is in"
        different = self._differing(*self._of_calls, local)
        if different is not None:
            return different
        try:
            names = _Globals(self.module)
            tensors, numbers = _finder(self._tensors)(local, names), _finder(self._numbers)(local, names)
        except _ELSEWHERE as error:
            return str(error)
        if not all(isinstance(t, torch.Tensor) for t in tensors) or _same(tensors) != self._same_tensors:
            return "which tensors are one"
        key = numbers, tuple((t.dtype, t.device, t.shape, t.stride()) for t in tensors)
        if key in self._fitting:
            return None
        layouts = [Layout(dtype, device, tuple(size), stride) for dtype, device, size, stride in key[1]]
        different = self.sizes.difference(layouts, numbers)
        if different is None:
            if len(self._fitting) > 256:
                self._fitting.clear()
            self._fitting.add(key)
        return different

    @functools.cached_property
    def _of_calls(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Objects and values of other places than the model's: those are many, and a ``Watch`` sees whether they are
        as they were."""
        objects, values = (
            {place: fact for place, fact in facts.items() if not place.startswith("L['model']")}
            for facts in (self.objects, self.values)
        )
        return objects, values

    def _differing(self, objects: Mapping[str, Any], values: Mapping[str, Any], local: Mapping[str, Any]) -> str | None:
        names = _Globals(self.module)
        try:
            constants = _finder(tuple(values))(local, names)
            found = _finder(tuple(objects))(local, names)
            # A name is described once: functions' and classes' code takes time to look at.
            said = [
                fact if isinstance(value, _NAMED) and self._names.get(place) is value else describe(value)
                for (place, fact), value in zip(objects.items(), found, strict=True)
            ]
            now = *map(describe_value, constants), *said
        except (*_ELSEWHERE, UntoldError) as error:
            return f"{type(error).__name__}: {error}"
        facts = values.items(), objects.items()
        for (place, fact), what in zip(itertools.chain(*facts), now, strict=True):
            if fact != what:
                return place
        if _same(found) != _numbered([self.same[place] for place in objects]):
            return "which objects are one"
        self._names |= {p: value for p, value in zip(objects, found, strict=True) if isinstance(value, _NAMED)}
        return None

    def arguments(self, local: Mapping[str, Any]) -> tuple[Any, ...]:
        """The graph's."""
        return _finder(self.inputs)(local, _Globals(self.module))


def _same(values: Sequence[Any]) -> tuple[int, ...]:
    """Of each value a number, equal where two are one object. Plain values and names may be equal without being one."""
    first: dict[int, int] = {}
    return tuple(
        -1 if isinstance(value, (*_PLAIN, *_NAMED)) else first.setdefault(id(value), i)
        for i, value in enumerate(values)
    )


def _numbered(numbers: Sequence[int]) -> tuple[int, ...]:
    """As ``_same`` numbers some of many."""
    first: dict[int, int] = {}
    return tuple(-1 if number == -1 else first.setdefault(number, i) for i, number in enumerate(numbers))


class Watch:
    """Whether the modules of a model, and their configurations, hold the objects that they held."""

    def __init__(self, model: torch.nn.Module) -> None:
        every: dict[int, dict[Any, Any]] = {}
        for module in model.modules():
            own = vars(module)
            for held in (
                own,
                *(value for value in own.values() if isinstance(value, dict)),
                *map(_attributes, own.values()),
            ):
                every[id(held)] = held
        self._dicts = list(every.values())
        self._held = self._now()

    def _now(self) -> list[Any]:
        held: list[Any] = []
        for each in self._dicts:
            held += each.values()
        return held

    def is_same(self) -> bool:
        now = self._now()
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))


def _attributes(value: Any) -> dict[Any, Any]:
    """Of a configuration."""
    return vars(value) if hasattr(value, "to_json_string") else {}


_HOOKS = "skip_nnmodule_hook_guards"  # Dynamo's setting; by default it does not see a new hook


def guarding_hooks() -> contextlib.AbstractContextManager[Any]:
    """Has Dynamo guard hooks, where it can."""
    settings: Any = torch._dynamo.config
    return settings.patch({_HOOKS: False}) if hasattr(settings, _HOOKS) else contextlib.nullcontext()


class Recorder:
    """Sees one compilation of Dynamo's: its backend calls ``note_graph`` and its guards go through ``note_guards``.

    Args:
        num_results: that the graph must have, all of which the function returns.

    Attributes:
        trace: what it has become; None where that cannot be said in facts, or there was none, or more than one.
        why: why there is none.
    """

    def __init__(self, num_results: int = 0) -> None:
        self._num_results = num_results
        self.trace: Trace | None = None
        self.why = "Dynamo's guards were not seen"
        self.run: Callable[..., Any] | None = None
        self._graph: tuple[fx.GraphModule, Any] | None = None
        self._count = 0

    @property
    def is_used(self) -> bool:
        return self._count > 0

    def note_graph(self, gm: fx.GraphModule, run: Callable[..., Any]) -> None:
        """From within a backend of Dynamo's, which gives ``run`` back."""
        self._count += 1
        self.run = run
        try:
            from torch._dynamo.symbolic_convert import InstructionTranslator

            self._graph = gm, InstructionTranslator.current_tx().output
        except (AttributeError, ImportError) as error:  # in versions that have it elsewhere
            self.why = f"{type(error).__name__}: {error}"

    def note_guards(self, entries: Sequence[Any]) -> Sequence[bool]:
        """As Dynamo calls a ``guard_filter_fn``; all of them stay."""
        try:
            self.trace = self._made(entries)
        except Exception as error:  # Dynamo's own classes differ from version to version
            self.trace, self.why = None, f"{type(error).__name__}: {error}"
        self._graph = None
        return [True] * len(entries)

    def _made(self, entries: Sequence[Any]) -> Trace:
        if getattr(torch._dynamo.config, _HOOKS, True):
            raise UntoldError(f"PyTorch {torch.__version__} does not say that hooks are guarded")
        if self._graph is None and self._count == 1:
            raise UntoldError(self.why)
        if self._graph is None or self._count != 1:
            raise UntoldError(f"there were {self._count} graphs")
        gm, output = self._graph
        num_results = sum(len(node.args[0]) for node in gm.graph.find_nodes(op="output"))
        if num_results != self._num_results:
            raise UntoldError(f"the graph has {num_results} results")
        if not output.side_effects.is_empty():
            raise UntoldError("the function changes Python objects")
        inputs = input_sources(gm)
        guarded = {_place(entry.orig_guard) for entry in entries}
        sizes = _sizes(gm, inputs, output, guarded)
        objects, values, found = {}, {}, dict[str, Any]()
        modules = _own_names_of_modules(output)
        for entry in entries:
            place, kind = _place(entry.orig_guard), entry.guard_type
            for name, lasting in modules.items():
                place = place.replace(f"G[{name!r}]", f"G[{lasting!r}]")
            if not place and kind in _STATES:
                continue
            if kind == "DUPLICATE_INPUT" and isinstance(entry.value, _NAMED):
                continue  # another place says which it is, and this one may be a name of this compilation alone
            if kind == "HASATTR" and not entry.has_value:
                values[_presence(entry.orig_guard.originating_source)] = describe_value(False)
            elif kind in _OF_VALUES or (kind == "ID_MATCH" and isinstance(entry.value, enum.Enum)):
                values[place] = describe_value(entry.value)
            elif kind in _OF_OBJECTS or (kind == "ID_MATCH" and isinstance(entry.value, _NAMED)):
                objects[place], found[place] = describe(entry.value), entry.value
            else:
                raise UntoldError(f"a guard {kind} at {place!r}")
        unguarded = next((place for place in sizes.tensors if place not in found), None)
        if unguarded is not None:
            raise UntoldError(f"{unguarded} has no guard")
        same = dict(zip(found, _same(list(found.values())), strict=True))
        trace = Trace(gm, inputs, objects, values, sizes, same, output.global_scope["__name__"])
        assert self.run is not None
        trace.call = self.run
        return trace


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("torch_mpk trace", default=None)


@contextlib.contextmanager
def recording(num_results: int = 0) -> Iterator[Recorder]:
    """A recorder of what Dynamo compiles inside, whose backend calls ``note_graph`` and whose ``guard_filter_fn`` is
    ``note_guards``."""
    recorder = Recorder(num_results)
    token = _recorder.set(recorder)
    try:
        with guarding_hooks():
            yield recorder
    finally:
        _recorder.reset(token)


def note_graph(gm: fx.GraphModule, run: Callable[..., Any]) -> None:
    recorder = _recorder.get()
    if recorder is not None:
        recorder.note_graph(gm, run)


def note_guards(entries: Sequence[Any]) -> Sequence[bool]:
    recorder = _recorder.get()
    return [True] * len(entries) if recorder is None else recorder.note_guards(entries)


def _sizes(gm: fx.GraphModule, inputs: Sequence[str], output: Any, guarded: Container[str]) -> Sizes:
    """Of all tensors that are guarded, and so of the graph's inputs: nothing is asked of what these are views of."""
    fakes = {_place(each.source): each.fake for each in output.tracked_fakes}
    fakes = {place: fake for place, fake in fakes.items() if place in guarded or place in inputs}
    tensors = {place: Layout.of(fake) for place, fake in fakes.items() if isinstance(fake, torch.Tensor)}
    numbers: dict[str, Any] = {}
    for place, node in zip(inputs, gm.graph.find_nodes(op="placeholder"), strict=True):
        example = node.meta["example_value"]
        if isinstance(example, torch.SymInt):
            numbers[place] = example.node.expr
        elif place not in tensors:
            raise UntoldError(f"the input {place} is not among the tensors that Dynamo has seen")
    numbers |= {p: fake.node.expr for p, fake in fakes.items() if isinstance(fake, torch.SymInt)}
    if not all(n.is_Symbol for n in numbers.values()):
        raise UntoldError("a number is an expression")
    env = output.shape_env
    symbols = set(numbers.values()).union(
        *(n.free_symbols for t in tensors.values() for n in t.numbers if not isinstance(n, int))
    )
    ranges = {symbol: (env.var_to_range[symbol].lower, env.var_to_range[symbol].upper) for symbol in symbols}
    hints = {symbol: int(env.backed_var_to_val[symbol]) for symbol in symbols}
    conditions = tuple(env.replace(guard.expr) for guard in env.guards)
    for condition in conditions:
        if not condition.free_symbols <= symbols:
            raise UntoldError(f"sizes must satisfy {condition}, which is about others than the inputs'")
    return Sizes(tensors, numbers, conditions, ranges, hints)
