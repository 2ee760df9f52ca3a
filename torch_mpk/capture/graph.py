"""Stage 1, capture: Dynamo's graph -> a pre-dispatch ATen graph, with in-place operations kept.

Dynamo's graph is replayed on fake tensors under ``make_fx(pre_dispatch=True)``, which normalises names to
``OpOverload``s and keeps ``linear``, ``scaled_dot_product_attention`` and the in-place cache writes whole. AOTAutograd
would lose all of them and copy whole caches. The replay has a fake mode and symbols of its own: a guard it adds must
not reach Dynamo, where it would cause another compilation with every new size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from torch_mpk.capture.aliasing import written_storages
from torch_mpk.capture.fake_mode import repeated_fakes
from torch_mpk.capture.foreign import NUMBERS, Foreign, foreign_calls, is_foreign, stand_in
from torch_mpk.capture.tracing import copied, graph_module, make_fx
from torch_mpk.errors import UnsupportedError, first_line

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One argument of the captured graph, in the order of its placeholders."""

    name: str
    # a fake tensor, a symbol of the captured graph, or a constant of it
    value: torch.Tensor | torch.SymInt | int | float
    is_parameter: bool
    is_mutated: bool  # written in place, itself or through a view
    source: str  # where Dynamo found it: "L['kwargs']['past_key_values'].layers[0].keys"
    is_foreign: bool = False  # no plain tensor: ``value`` stands in

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


@dataclasses.dataclass
class Captured:
    """A captured graph.

    Each node has ``meta["val"]`` (fake tensors or symbols), and ``stack_trace`` and ``nn_module_stack`` from the user's
    model.
    """

    graph_module: torch.fx.GraphModule
    inputs: list[GraphInput]
    conditions: tuple[sympy.Basic, ...] = ()  # on the symbols of the inputs, without which the graph does not hold

    @property
    def symbols(self) -> dict[sympy.Expr, int]:
        """Positions of the inputs that are numbers, by their symbols."""
        values = [graph_input.value for graph_input in self.inputs]
        return {n.node.expr: i for i, n in enumerate(values) if isinstance(n, torch.SymInt)}

    @property
    def is_symbolic(self) -> bool:
        return bool(self.symbols)

    @property
    def mutated(self) -> tuple[int, ...]:
        """Positions of the inputs that the graph writes in place."""
        return tuple(i for i, graph_input in enumerate(self.inputs) if graph_input.is_mutated)

    def __str__(self) -> str:
        lines = [
            f"{node.name}: {_describe(graph_input)}"
            for node, graph_input in zip(self.graph_module.graph.nodes, self.inputs, strict=False)
        ]
        lines += [f"model: {name}" for name in [_model_class(self.graph_module)] if name]
        return "\n".join([*lines, "", self.graph_module.print_readable(print_output=False)])

    def key(self) -> str:
        """Hash of everything a build of this graph depends on: equal keys may share one executable."""
        digest = hashlib.sha256()

        def add(*parts: Any) -> None:
            digest.update(repr(parts).encode())

        for node in self.graph_module.graph.nodes:
            add(node.op, node.name, str(node.target), node.args, node.kwargs)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                add(value.dtype, value.size(), value.stride(), value.device)
            if node.op == "get_attr":
                constant = getattr(self.graph_module, node.target)
                add(constant.tolist() if isinstance(constant, torch.Tensor) else id(constant))
        return digest.hexdigest()


def capture(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    specialize: bool | Sequence[int] = False,
    conditional: bool = False,
) -> Captured:
    """Captures ``gm``, as Dynamo hands it to a backend.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: tensors, ints and SymInts, one per placeholder. Their values are not read. Calls that take
            others are kept as calls of ``Foreign``.
        specialize: replace each number among the inputs by its value, so that the graph has concrete shapes, or those
            at such positions.
        conditional: take a graph that holds only for some values of the numbers among its inputs, too: Dynamo does not
            check its ``conditions``.

    Raises:
        UnsupportedError: an input that is no plain tensor is written in place, the graph cannot be replayed on fake
            tensors, or it would hold only for some values of the numbers among its inputs (then ``specialize``, unless
            ``conditional``).
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    fakes = _Fakes(specialize is True)
    if not isinstance(specialize, bool):
        fakes.fix({placeholders[i].meta["example_value"].node.expr: example_inputs[i] for i in specialize})
    args = [fakes.make(node, value) for node, value in zip(placeholders, example_inputs, strict=True)]
    calls = foreign_calls(gm.graph, example_inputs, input_sources(gm))
    examples = {node: fakes.results(node.meta.get("example_value")) for node in calls}
    replay = _Replay(gm, {node: Foreign(node, why, examples[node]) for node, why in calls.items()})
    try:
        # Under the lock, since whether a process keeps nodes' metadata is a setting of all its threads.
        lock = torch._dynamo.convert_frame.compile_lock
        with lock, fakes.mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
            traced = make_fx(replay.run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*args)
    except UnsupportedError:
        raise
    except Exception as error:
        node = replay.node
        raise UnsupportedError(
            f"it cannot be traced on fake tensors ({first_line(error)})",
            node.name if node else None,
            source_line(node) if node else None,
        ) from error
    clean(traced)
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, node.target), FakeTensor):  # associative_scan does so
            raise UnsupportedError(
                "an operation computes tensors that tracing does not see", node.name, source_line(node)
            )
    for node, arg in zip(traced.graph.nodes, args, strict=False):
        node.meta["val"] = arg
    lay_out_as_eager(traced.graph)
    mutated = frozenset().union(*map(written_storages, traced.graph.nodes))
    inputs = [
        GraphInput(
            node.name, arg, _is_parameter(node, value), _storage(arg) in mutated, _source(node), is_foreign(value)
        )
        for node, value, arg in zip(placeholders, example_inputs, args, strict=True)
    ]
    captured = Captured(traced, inputs, tuple(guard.expr for guard in fakes.shape_env.guards))
    if captured.conditions and not conditional:
        raise UnsupportedError(f"its sizes must satisfy {', '.join(map(str, captured.conditions))}")
    return captured


def written_inputs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Sequence[int]:
    """The positions of the inputs that a graph writes in place; of all but parameters where that cannot be known."""
    try:
        return capture(gm, example_inputs, specialize=True).mutated
    except UnsupportedError:
        return [i for i, value in enumerate(example_inputs) if not isinstance(value, torch.nn.Parameter)]


class Conditions:
    """What the numbers of a call must satisfy for a captured graph to be that call's; false where it holds for all."""

    def __init__(self, captured: Captured) -> None:
        """Raises UnsupportedError where that is more than a call's numbers say."""
        self._conditions, self._symbols = captured.conditions, captured.symbols
        for condition in self._conditions:
            if not condition.free_symbols <= self._symbols.keys():
                raise UnsupportedError(f"its sizes must satisfy {condition}")
        self._hold_for = functools.lru_cache(4096)(self._evaluate)

    def __bool__(self) -> bool:
        return bool(self._conditions)

    def hold(self, args: Sequence[Any]) -> bool:
        return self._hold_for(tuple(args[i] for i in self._symbols.values()))

    def _evaluate(self, numbers: tuple[int, ...]) -> bool:
        known = dict(zip(self._symbols, numbers, strict=True))
        return all(condition.subs(known) for condition in self._conditions)


def input_sources(gm: torch.fx.GraphModule) -> list[str]:
    """Where Dynamo found each input: ``GraphInput.source``."""
    return [_source(node) for node in gm.graph.find_nodes(op="placeholder")]


def number_positions(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """The positions of the inputs that are numbers: sizes, and Python floats, which Dynamo passes in tensors."""
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    inputs = zip(placeholders, example_inputs, strict=True)
    return [i for i, (node, value) in enumerate(inputs) if isinstance(value, NUMBERS) or _is_number(node)]


def size_positions(gm: torch.fx.GraphModule, written: Sequence[int]) -> list[int]:
    """The positions of the inputs that are sizes of what the graph writes in place, by its positions: of caches, whose
    lengths and batches have to be known to build for them."""
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    symbols: set[sympy.Symbol] = set()
    for example in (examples[i] for i in written):
        for n in (*example.size(), *example.stride()):
            symbols |= n.node.expr.free_symbols if isinstance(n, torch.SymInt) else set()
    return [i for i, n in enumerate(examples) if isinstance(n, torch.SymInt) and n.node.expr.free_symbols & symbols]


def without_numbers(
    gm: torch.fx.GraphModule, args: Sequence[Any], numbers: Sequence[int]
) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph that Dynamo would have made had it known the numbers of a call, and the positions of its inputs."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    copies: dict[torch.fx.Node, Any] = {}
    for node, arg in ((placeholders[i], args[i]) for i in numbers):
        copies[node] = arg
        if isinstance(arg, torch.Tensor):  # that holds a Python float
            copies |= dict.fromkeys(node.users, arg.item())
    graph = torch.fx.Graph()
    for node in gm.graph.nodes:
        if node in copies:
            continue
        copies[node] = copy = copied(graph, node, copies.__getitem__)
        if node.op == "placeholder":
            copy.meta.pop("example_value", None)  # whose sizes are symbols
    return graph_module(gm, graph), [i for i in range(len(args)) if i not in numbers]


def _is_number(placeholder: torch.fx.Node) -> bool:
    users = list(placeholder.users)
    return bool(users) and all(user.op == "call_method" and user.target == "item" for user in users)


class _Fakes:
    """Fake stand-ins for a graph's inputs that share no symbol with Dynamo's."""

    def __init__(self, specialize: bool) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # with sympy, which importing should not need

        self.shape_env = ShapeEnv()
        self.mode = repeated_fakes(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self._specialize = specialize
        self._symbols: dict[sympy.Symbol, sympy.Symbol | sympy.Integer] = {}

    def fix(self, values: Mapping[sympy.Symbol, int]) -> None:
        """Gives symbols of Dynamo's values."""
        from sympy import Integer

        self._symbols |= {symbol: Integer(number) for symbol, number in values.items()}

    def make(self, node: torch.fx.Node, value: Any) -> torch.Tensor | torch.SymInt | int | float:
        example = node.meta.get("example_value", value)
        if is_foreign(value):
            with self.mode:
                return stand_in(value, torch.device("cpu"))
        if isinstance(value, torch.Tensor):
            if _is_number(node):
                if not self._specialize:
                    raise UnsupportedError(f"{_source(node)} is a Python number that differs from call to call")
                return value.item()
            return self._like(value if self._specialize else example, value)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self._size(value if self._specialize else example)
        raise UnsupportedError(
            f"input {node.name} ({_source(node)}) is a {type(value).__name__}, not a tensor or integer"
        )

    def results(self, examples: Any) -> Any:
        """What stands in for results of a call, given Dynamo's stand-ins."""

        def make(example: Any) -> Any:
            if isinstance(example, torch.Tensor):
                return self._like(example, example)
            return self._size(example) if isinstance(example, torch.SymInt) else example

        return tree_map(make, examples)

    def _like(self, sizes: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        size, stride = ([self._size(dim) for dim in dims] for dims in (sizes.size(), sizes.stride()))
        with self.mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)

    def _size(self, dim: int | torch.SymInt) -> int | torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        if isinstance(dim, int):
            return dim
        if self._specialize:
            return dim.node.hint  # int(dim) would make Dynamo specialise on the value
        expr = dim.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._symbols:
                source = ConstantSource(f"symbol_{symbol}")
                value = int(dim.node.shape_env.backed_var_to_val[symbol])
                self._symbols[symbol] = self.shape_env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        own = expr.xreplace(self._symbols)
        if own.is_Integer:
            return int(own)
        return self.shape_env.create_symintnode(own, hint=int(own.xreplace(self.shape_env.backed_var_to_val)))


# Calls that do nothing when the graph runs without autograd, as ours do. Disabled autocast is the surrounding state:
# under autocast nothing is captured.
_STATE_CALLS = {
    torch._C._set_grad_enabled,
    torch._C._log_api_usage_once,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}


_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


# Operators whose results eager lays out in another way than PyTorch's fake tensors say, and how.
_LAYOUTS = {
    ("cpu", aten.log_sigmoid.default): torch.contiguous_format,
    ("cpu", aten.index_fill.int_Scalar): torch.preserve_format,
    ("cuda", aten.index_fill.int_Scalar): torch.preserve_format,
}


def lay_out_as_eager(graph: torch.fx.Graph) -> None:
    """Gives results the layout that eager gives them, where their example values have another."""
    for node in graph.nodes:
        value = node.meta.get("val")
        layout = _LAYOUTS.get((value.device.type, node.target)) if isinstance(value, FakeTensor) else None
        if layout is not None:
            with value.fake_mode:
                node.meta["val"] = torch.empty_like(node.args[0].meta["val"], memory_format=layout)


class _Replay(torch.fx.Interpreter):
    node: torch.fx.Node | None = None  # the one that runs, for error messages

    def __init__(self, gm: torch.fx.GraphModule, foreign: Mapping[torch.fx.Node, Foreign]) -> None:
        super().__init__(gm)
        self._foreign = foreign

    def run_node(self, n: torch.fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.node in self._foreign:
            return self._foreign[self.node].trace(args, kwargs)
        if target in _STATE_CALLS:
            if target is torch.amp.autocast_mode._enter_autocast and args[2]:
                raise UnsupportedError("autocast is entered inside the graph")
            return None
        if target is _DATA:  # ``tensor.data``, which no dispatch mode sees
            target = torch.Tensor.detach
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.node in self._foreign:
            return self._foreign[self.node].trace(args, kwargs)
        if target == "item" and isinstance(args[0], (int, float)):  # a number that was specialised
            return args[0]
        return super().call_method(target, args, kwargs)


def clean(gm: torch.fx.GraphModule) -> None:
    """Removes dead nodes and aliases of a whole tensor, and makes scalar constants ``full`` nodes."""
    for node in gm.graph.nodes:
        if node.target in (aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh.default):
            node.replace_all_uses_with(node.args[0])
        elif (
            node.target is aten.lift_fresh_copy.default and (constant := _scalar_constant(gm, node.args[0])) is not None
        ):
            with gm.graph.inserting_before(node):
                kwargs = {"dtype": constant.dtype, "device": constant.device}
                full = gm.graph.call_function(aten.full.default, ([], constant.item()), kwargs)
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
        else:
            continue
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code(_has_effects)
    gm.recompile()


def _scalar_constant(gm: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor | None:
    constant = getattr(gm, node.target) if node.op == "get_attr" else None
    return constant if isinstance(constant, torch.Tensor) and constant.dim() == 0 else None


def _has_effects(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)


def _describe(graph_input: GraphInput) -> str:
    value = graph_input.value
    kind = "parameter" if graph_input.is_parameter else "mutated" if graph_input.is_mutated else "input"
    if not isinstance(value, torch.Tensor):
        return f"{kind} {value} {graph_input.source}"
    return (
        f"{kind} {value.dtype}{list(value.size())} strides {list(value.stride())} {value.device} {graph_input.source}"
    )


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _is_parameter(node: torch.fx.Node, value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _model_class(gm: torch.fx.GraphModule) -> str:
    """The class of the outermost module that an operation runs in; empty where none does."""
    stacks = (list((node.meta.get("nn_module_stack") or {}).values()) for node in gm.graph.nodes)
    outermost = next((stack[0][1] for stack in stacks if stack), "")
    return getattr(outermost, "__name__", str(outermost).rpartition(".")[2])


def _source(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return name() if callable(name) else name


def source_line(node: torch.fx.Node) -> str | None:
    """The innermost line of the user's model that ``node`` comes from, as ``file.py:line in function``."""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    if not frames:
        return None
    file, line, function = (part.strip() for part in frames[-1].split(",", 2))
    return f"{file.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')} {function}"
