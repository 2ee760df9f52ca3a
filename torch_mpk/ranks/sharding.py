"""Graphs of tensor-parallel models: each rank's own part of one, as plain tensors and exchanges between the ranks.

A model that DTensor has sharded has DTensors at the edges of Dynamo's graph, and local tensors between them.
``localise`` follows each DTensor to where its local tensor is taken, and makes a graph of local tensors that means the
same. Exchanges become the tasks ``all_reduce`` and ``all_gather``.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from torch_mpk.capture.graph import source_line
from torch_mpk.capture.tracing import copied, graph_module
from torch_mpk.dispatch.recompile_limit import Function, being_compiled
from torch_mpk.errors import UnsupportedError
from torch_mpk.ranks.choices import Gathered, choose_before_gathering
from torch_mpk.runtime.team import resolve

# What makes a tensor with memory of its own, which nothing else is a view of.
_MAKERS = (torch._C._nn.linear, F.linear, torch.matmul, operator.matmul, torch.bmm)
_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack")


@dataclasses.dataclass(frozen=True)
class Local:
    """A graph of local tensors.

    Attributes:
        gm: what a rank computes. It can be called, too.
        taken: which of the sharded graph's inputs it takes.
    """

    gm: fx.GraphModule
    taken: tuple[int, ...]

    def pick(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of ``gm`` out of the sharded graph's."""
        return [getattr(args[i], "_local_tensor", args[i]) for i in self.taken]

    def callable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` for the sharded graph's arguments."""
        return lambda *args: run(*self.pick(args))


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """A DTensor of the graph: the node of its local tensor, and how that is a part of the whole."""

    local: fx.Node
    mesh: Any
    placement: Any
    size: int  # of the whole in the dimension that is sharded; 0 where none is


@dataclasses.dataclass(frozen=True)
class _Exchanged:
    """What an exchange gives, before it is waited for."""

    result: fx.Node


def localise(gm: fx.GraphModule, inputs: Sequence[Any]) -> Local | None:
    """The graph of local tensors that means what Dynamo's ``gm`` means; None where that has neither DTensors nor
    exchanges.

    Raises UnsupportedError where something is done to a DTensor that is not known here, or where ranks' shards differ
    in size.
    """
    # PyTorch 2.11 has meshes of DTensors that are made inside in functions, and not among the inputs.
    if not any(_is_sum(node) or _is_sharded(node.meta.get("example_value")) for node in gm.graph.nodes):
        return None
    return _Localiser(gm, inputs).run()


def group_of_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """The process group within which a graph exchanges, of Dynamo's or ``localise``'s; the first one where there are
    several, None where there is none."""
    for node in gm.graph.nodes:
        if _is_sum(node):
            return str(node.args[2])
        if {"ranks", "group"} <= node.kwargs.keys():
            return str(node.kwargs["group"])
    return next((_group_of(value.device_mesh) for value in inputs if _is_sharded(value)), None)


def function_of_graph(gm: fx.GraphModule) -> Function | None:
    """The function that Dynamo has compiled ``gm`` of, or compiles now, as far as that is known."""
    marks = (node.meta.get("function") for node in gm.graph.nodes)
    return next(filter(None, marks), None) or being_compiled()


def _group_of(mesh: Any) -> str | None:
    if mesh.ndim != 1:  # such as FSDP's around it, whose ranks have batches of their own
        return _group_of(mesh["tp"]) if "tp" in (mesh.mesh_dim_names or ()) else None
    return None if mesh.size() == 1 else str(mesh.get_group().group_name)


def group_of_model(model: torch.nn.Module) -> str | None:
    """The name of the process group to which a model's weights are shared out; None where they are whole."""
    weights: Iterator[Any] = filter(_is_sharded, model.parameters())
    return next((_group_of(weight.device_mesh) for weight in weights), None)


def _are_alike(a: Any, b: Any, dims: int) -> bool:
    """Whether two placements of a tensor of so many dimensions are the same."""
    if a.is_partial() or b.is_partial():
        return a.is_partial() and b.is_partial() and a.reduce_op == b.reduce_op
    if a.is_shard() and b.is_shard():
        return bool(a.dim % dims == b.dim % dims)
    return bool(a == b)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value).__name__ == "DTensor"


def _is_mesh(value: Any) -> bool:
    return type(value).__name__ == "DeviceMesh"


def _is_sum(node: fx.Node) -> bool:
    """Whether it is a sum over a group, as Dynamo writes ``torch.distributed.all_reduce``."""
    return node.op == "call_function" and str(node.target).startswith("_c10d_functional.all_reduce")


class _Localiser:
    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm, self.inputs = gm, inputs
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.sums: dict[Any, fx.Node] = {}  # of what
        self.gathered: list[Gathered] = []
        self.function = being_compiled()
        self.node: fx.Node = next(iter(gm.graph.nodes))

    def run(self) -> Local:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, self.inputs, strict=True))
        for node in self.gm.graph.nodes:
            self.node = node
            self.env[node] = self._take(values[node]) if node in values else self._visit(node)
            self._check_placement(self.env[node])
        taken = [i for i, node in enumerate(placeholders) if isinstance(self.env[node], (fx.Node, _Sharded))]
        for node in reversed(list(self.graph.nodes)):  # from_local asks for strides in this way
            if node.target is torch.empty and not node.users:
                self.graph.erase_node(node)
        for gathered in self.gathered:
            choose_before_gathering(gathered)
        return Local(graph_module(self.gm, self.graph), tuple(taken))

    def _take(self, value: Any) -> Any:
        """An input, as what stands for it."""
        if _is_mesh(value):
            return value
        copy = self._copied()
        if not _is_sharded(value):
            return copy
        example = self.node.meta.get("example_value")
        copy.meta["example_value"] = getattr(example, "_local_tensor", value._local_tensor)
        placement = self._only(value.placements)
        size = value.shape[placement.dim] if placement.is_shard() else 0
        return self._part(copy, value.device_mesh, placement, size)

    def _part(self, local: fx.Node, mesh: Any, placement: Any, size: int) -> _Sharded:
        if placement.is_shard() and (not isinstance(size, int) or size % mesh.size() != 0):
            raise self._refusal(f"{size} rows or columns are not shared out evenly to {mesh.size()} ranks")
        if mesh.ndim != 1:
            raise self._refusal(f"the mesh of ranks has {mesh.ndim} dimensions, and torch_mpk takes one")
        return _Sharded(local, mesh, placement, size)

    def _check_placement(self, value: Any) -> None:
        """That a DTensor is a part of the whole in the way that DTensor says, whose operators may redistribute."""
        told = getattr(self.node.meta.get("example_value"), "placements", None)
        if isinstance(value, _Sharded) and told and not _are_alike(value.placement, told[0], self._dims()):
            raise self._refusal(f"its result is {told[0]} where torch_mpk makes it {value.placement}")

    def _dims(self) -> int:
        return int(self.node.meta["example_value"].dim())

    def _only(self, placements: Sequence[Any]) -> Any:
        if len(placements) != 1:
            raise self._refusal(f"the mesh of ranks has {len(placements)} dimensions, and torch_mpk takes one")
        return placements[0]

    def _placement(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Of ``from_local`` and ``redistribute``, behind the tensor and the mesh."""
        return self._only(kwargs["placements"] if "placements" in kwargs else args[2])

    def _visit(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if name.startswith("prim"):  # up to PyTorch 2.11 Dynamo keeps what is no tensor in a function of its own
            held = inspect.getclosurevars(node.target).nonlocals
            name = name.removeprefix("prim").lstrip("_ ")
            args, kwargs = (*args, *held["args_as_value"]), {**kwargs, **held["kwargs_as_value"]}
        first: Any = args[0] if args else None
        if _is_sum(node):
            return _Exchanged(self._summed(*args))
        if isinstance(first, _Exchanged) and "wait_tensor" in str(node.target):
            return first.result
        if name == "copy_" and node.target == "copy_" and self._is_spare(node.args[0], args[1]):
            self.env[node.args[0]] = args[1]  # the copy is all that becomes of it
            return args[1]
        if name == "from_local" and node.op == "call_function":
            placement, shape = self._placement(args, kwargs), kwargs.get("shape")
            size = shape[placement.dim] if shape is not None and placement.is_shard() else 0
            return self._part(first, args[1], placement, size)
        if not any(isinstance(self.env[arg], _Sharded) for arg in node.all_input_nodes):
            return self._copied()
        if name == "to_local":
            return first.local
        if name == "redistribute":
            return self._redistributed(first, self._placement(args, kwargs))
        if name == "embedding":
            return self._embedded(*args)
        if node.target in (operator.mul, torch.mul) and isinstance(first, _Sharded) and self._is_number(node.args[1]):
            return self._scaled(first, args[1])
        raise self._refusal(f"{name} is called on a DTensor, and of DTensors only local tensors are taken")

    def _scaled(self, x: _Sharded, factor: Any) -> _Sharded:
        """As embeddings are. DTensor sums partial ones before."""
        told = getattr(self.node.meta.get("example_value"), "placements", None)
        x = self._redistributed(x, told[0]) if told and x.placement.is_partial() and told[0].is_replicate() else x
        return dataclasses.replace(x, local=self._call(torch.mul, x.local, factor))

    def _is_number(self, arg: Any) -> bool:
        """Whether it is a number, maybe in a tensor of its own."""
        if not isinstance(arg, fx.Node):
            return isinstance(arg, (int, float))
        example = arg.meta.get("example_value")
        return isinstance(self.env[arg], fx.Node) and isinstance(example, torch.Tensor) and example.dim() == 0

    def _copied(self) -> fx.Node:
        """The node as it is, of local tensors."""
        return copied(self.graph, self.node, self._plain)

    def _plain(self, arg: fx.Node) -> fx.Node:
        value = self.env[arg]
        if isinstance(value, fx.Node):
            return value
        raise self._refusal(f"{arg.name} is no tensor of this rank's alone")

    def _is_spare(self, tensor: fx.Node, result: Any) -> bool:
        """Whether what is copied over a tensor may take its place: nobody else has seen that tensor yet."""
        if tensor.target not in _MAKERS or not isinstance(result, fx.Node) or self.sums.get(tensor) is not result:
            return False
        return all(user is self.node or _is_sum(user) or user not in self.env for user in tensor.users)

    def _summed(self, x: fx.Node, operation: str, group: str) -> fx.Node:
        if operation != "sum":
            raise self._refusal(f"ranks exchange the {operation} of what they have, and torch_mpk takes sums")
        result = self._exchange("all_reduce", x, group)
        self.sums[self.node.args[0]] = result
        return result

    def _exchange(self, task: str, x: fx.Node, group: str) -> fx.Node:
        made = self._call(getattr(torch.ops.mpk, task), x, ranks=resolve(group).size(), group=group)
        made.meta["function"] = self.function
        return made

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(function, args, kwargs)
        made.meta = {key: self.node.meta[key] for key in _PROVENANCE if key in self.node.meta}
        return made

    def _redistributed(self, x: _Sharded, placement: Any) -> _Sharded:
        group = x.mesh.get_group().group_name
        if x.placement == placement:
            return x
        if x.placement.is_partial() and placement.is_replicate() and x.placement.reduce_op == "sum":
            return _Sharded(self._exchange("all_reduce", x.local, group), x.mesh, placement, 0)
        if x.placement.is_shard(-1) and placement.is_replicate():
            return _Sharded(self._gathered(x, group), x.mesh, placement, 0)
        if x.placement.is_replicate() and placement.is_shard(-1):
            return self._split(x, placement)
        raise self._refusal(
            f"a DTensor goes from {x.placement} to {placement}, an exchange that torch_mpk has no task for"
        )

    def _gathered(self, x: _Sharded, group: str) -> fx.Node:
        """What all ranks have, side by side."""
        exchange, told = self._exchange("all_gather", x.local, group), self.node.meta.get("example_value")
        if isinstance(told, torch.Tensor) and x.size:
            begin = x.mesh.get_local_rank() * (x.size // x.mesh.size())
            self.gathered.append(Gathered(exchange, told.shape, told.dtype, begin))
        return exchange

    def _split(self, x: _Sharded, placement: Any) -> _Sharded:
        """This rank's columns of what all have."""
        example = self.node.meta.get("example_value")
        size = example.shape[-1] if isinstance(example, torch.Tensor) else 0
        if not isinstance(size, int) or size == 0 or size % x.mesh.size() != 0:
            raise self._refusal(f"{size} columns are not shared out evenly to {x.mesh.size()} ranks")
        own = size // x.mesh.size()
        return self._part(
            self._call(torch.narrow, x.local, -1, x.mesh.get_local_rank() * own, own), x.mesh, placement, size
        )

    def _embedded(self, ids: Any, weight: Any, *others: Any) -> _Sharded:
        """Rows of a table whose rows are shared out: those that this rank has, and zeros for others."""
        is_known = isinstance(ids, _Sharded) and isinstance(weight, _Sharded) and ids.placement.is_replicate()
        if not is_known or not weight.placement.is_shard(0):
            raise self._refusal("of embeddings torch_mpk takes those whose rows are shared out to the ranks")
        from torch.distributed.tensor import Partial

        rows = weight.size // weight.mesh.size()
        own = self._call(operator.sub, ids.local, weight.mesh.get_local_rank() * rows)
        is_own = self._call(operator.and_, self._call(operator.ge, own, 0), self._call(operator.lt, own, rows))
        found = self._call(F.embedding, self._call(torch.where, is_own, own, 0), weight.local)
        kept = self._call(torch.where, self._call(torch.unsqueeze, is_own, -1), found, 0.0)
        return _Sharded(kept, weight.mesh, Partial(), 0)

    def _refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(reason, self.node.name, source_line(self.node))
