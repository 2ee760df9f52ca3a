"""What layers append to: a graph of calls of tasks and ATen operations, as lowering takes them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mpk.capture.aliasing import evaluate
from torch_mpk.capture.tracing import make_fx
from torch_mpk.errors import GridError, LayerError
from torch_mpk.lowering.values import is_injective
from torch_mpk.persistent_kernel.dtypes import Operands, check_dtypes
from torch_mpk.persistent_kernel.grid import LEFT_OUT, Sizes, as_grid, check_grid, sizes_of, split_dims
from torch_mpk.persistent_kernel.tensor import Dim3, GlobalTensor, Interleaved, kind_of
from torch_mpk.registry import Task, bind_dims
from torch_mpk.tasks.linear import linear

if TYPE_CHECKING:
    from torch_mpk.persistent_kernel.kernel import PersistentKernel

aten = torch.ops.aten

Made = GlobalTensor | tuple[GlobalTensor, ...] | None  # by a layer


class Builder:
    """The graph of a ``PersistentKernel``. ``layer`` is the one being appended, as errors name it."""

    def __init__(self, kernel: PersistentKernel) -> None:
        self.kernel = kernel
        self.graph = fx.Graph()
        self.layer = ""
        self._label = ""
        self._num_layers = 0
        self._is_within = False
        self._fake_mode = FakeTensorMode()
        self._first_call: fx.Node | None = None

    def begin(self, layer: str, output: GlobalTensor | None) -> None:
        """What comes next belongs to this layer. In artefacts and reports its nodes are called by it and by what it
        writes, as "silu_mul.mlp_mid", or its number where that is a new tensor."""
        if self._is_within:
            return
        written = output.name if isinstance(output, GlobalTensor) else self._num_layers
        self.layer, self._label = layer, f"{layer.removesuffix('_layer')}.{written}"
        self._num_layers += 1

    @contextlib.contextmanager
    def within(self, layer: str, output: GlobalTensor | None) -> Iterator[None]:
        """``begin``, of a layer that is made of others: what they append is its own."""
        self.begin(layer, output)
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    # ---- nodes ----

    def placeholder(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """An argument. Arguments come before all calls, whenever they are attached."""
        with self.graph.inserting_before(self._first_call) if self._first_call else contextlib.nullcontext():
            node = self.graph.placeholder(name)
        node.target = node.name  # any string may be a tensor's name, and this one is a Python identifier
        node.meta["val"] = self._fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._fake_mode:
            value = evaluate(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        node.meta["nn_module_stack"] = {"layer": (self._label, None)}
        self._first_call = self._first_call or node
        return node

    def trace(self, function: Callable[..., Any], *nodes: fx.Node | None) -> Any:
        """Append the operations that a function of the nodes' values does; returns the nodes of its results."""
        given = [node for node in nodes if node is not None]
        with self._fake_mode:
            module = make_fx(function, pre_dispatch=True)(*(node.meta["val"] for node in given))
        copies = dict(zip(module.graph.find_nodes(op="placeholder"), given))
        arguments = set(copies)
        result = self.graph.graph_copy(module.graph, copies)
        for traced, node in copies.items():
            if traced not in arguments:
                node.meta["nn_module_stack"] = {"layer": (self._label, None)}
                self._first_call = self._first_call or node
        return result

    def interleave(self, parts: Sequence[fx.Node], layout: Interleaved) -> fx.Node:
        """One tensor of several."""
        joined = self.call(aten.cat.default, [self.grouped(part, layout) for part in parts], layout.dim + 1)
        shape = list(parts[0].meta["val"].shape)
        shape[layout.dim] = sum(layout.sizes)
        return self.call(aten.reshape.default, joined, shape)

    def grouped(self, node: fx.Node, layout: Interleaved) -> fx.Node:
        """A view in which ``layout.dim`` is two: the groups, and what a group has of it."""
        shape = list(node.meta["val"].shape)
        shape[layout.dim : layout.dim + 1] = [layout.num_groups, shape[layout.dim] // layout.num_groups]
        return self.call(aten.view.default, node, shape)

    def part(self, node: fx.Node, layout: Interleaved, index: int) -> fx.Node:
        """A view of part ``index`` of an interleaved tensor, in groups."""
        start, size = layout.extents[index]
        return self.call(aten.narrow.default, self.grouped(node, layout), layout.dim + 1, start, size)

    # ---- tensors ----

    def check(self, name: str, tensor: object) -> None:
        """Raises LayerError unless ``tensor`` is one of this kernel's."""
        if not isinstance(tensor, GlobalTensor):
            what = f"{name} is {kind_of(tensor)}: attach_input the tensor first, and pass what that returns"
            raise LayerError(layer=self.layer, what=what)
        if tensor.kernel is not self.kernel:
            what = f"{name}={tensor.name} belongs to another PersistentKernel: attach it to this one too"
            raise LayerError(layer=self.layer, what=what)

    def read(self, name: str, tensor: GlobalTensor) -> fx.Node:
        """The node of a tensor's present value. Raises LayerError where it has none."""
        self.check(name, tensor)
        if tensor.parts:
            assert tensor.layout is not None
            return self.interleave([self.read(name, part) for part in tensor.parts], tensor.layout)
        if tensor.node is None:
            what = f"{name}={tensor.name} is read before a layer has written it: attach_input what comes from outside"
            raise LayerError(layer=self.layer, what=what)
        return tensor.node

    def reshaped(self, name: str, tensor: GlobalTensor, shape: Sequence[int]) -> GlobalTensor:
        """A tensor's present value in another shape, to be read."""
        node = self.call(aten.reshape.default, self.read(name, tensor), list(shape))
        return GlobalTensor(tensor.name, tuple(shape), tensor.dtype, self.kernel, node=node)

    def store(self, output: GlobalTensor | None, node: fx.Node, grid_dim: Dim3 = None) -> GlobalTensor:
        """Make a value that of ``output``, or of a new tensor. The grid may split any dimension of it."""
        value = node.meta["val"]
        self.check_output(output, value.shape, value.dtype, grid_dim)
        if output is None:
            output = self.kernel.new_tensor(value.shape, dtype=value.dtype)
        output.layout = None
        if output.attached is None:
            output.node = node
        else:
            self.call(aten.copy_.default, output.node, node)
        return output

    def check_output(
        self, output: GlobalTensor | None, shape: Sequence[int], dtype: torch.dtype, grid_dim: Dim3 = None
    ) -> None:
        """Raises LayerError unless ``output`` is absent or can be written with such a value."""
        dims = {f"dimension {d}": size for d, size in enumerate(shape)}
        check_grid(self.layer, grid_dim, dims, list(dims))
        if output is None:
            return
        self.check_writable("output", output)
        if (tuple(shape), dtype) != (output.shape, output.dtype):
            what = f"{output.name} is {output.dtype} {list(output.shape)}, expected {dtype} {list(shape)}"
            raise LayerError(layer=self.layer, what=f"{what}: make it so, or leave it out for a new tensor")

    def check_writable(self, name: str, tensor: GlobalTensor) -> None:
        """Raises LayerError where writing would miss the memory of a tensor, or meet an element of it twice."""
        self.check(name, tensor)
        if tensor.parts:
            what = f"{tensor.name} is made of {', '.join(part.name for part in tensor.parts)}: write those"
            raise LayerError(layer=self.layer, what=what)
        if tensor.attached is not None and not is_injective(tensor.attached.shape, tensor.attached.stride()):
            what = f"{tensor.name} is written and has elements that share memory: attach a tensor that has its own"
            raise LayerError(layer=self.layer, what=what)

    # ---- tasks ----

    def sizes(self, task: Task, operands: Operands) -> dict[str, int]:
        """The sizes of the task's dimensions. Raises LayerError or TaskError where operands do not fit."""
        for name, tensor in operands.items():
            if tensor is not None:
                self.check(name, tensor)
        inputs = [operands.get(spec.name) for spec in task.inputs]
        shapes = [None if tensor is None else tensor.shape for tensor in inputs]
        sizes = task.check(shapes, [None if tensor is None else tensor.dtype for tensor in inputs])
        check_dtypes(self.layer, task, operands)
        for spec in task.outputs:
            if (output := operands.get(spec.name)) is not None:
                bind_dims(task.name, task.signature, [spec], [output.shape], sizes)
        return sizes_of(sizes)

    def task(self, task: Task, operands: Operands, attrs: Mapping[str, Any]) -> Made:
        """Append a task on operands that ``sizes`` has seen; an output that is absent is a new tensor."""
        inputs = {spec.name: operands.get(spec.name) for spec in task.inputs}
        for spec in task.inputs:
            if spec.is_write and (written := inputs[spec.name]) is not None:
                self.check_writable(spec.name, written)
        weight = inputs.get("weight") if task is linear else None
        if weight is not None and weight.layout and weight.parts and weight.layout.dim == 0:
            return self._linear_of_parts(inputs, weight.parts, weight.layout, operands.get("y"))
        nodes = [None if tensor is None else self.read(name, tensor) for name, tensor in inputs.items()]
        attrs = task.bind_attrs(attrs)
        with self._fake_mode:  # before anything is appended: a layer that raises leaves nothing behind
            results = task.results(evaluate(task, tuple(nodes), attrs))
        for spec, result in zip(task.outputs, results):
            self.check_output(operands.get(spec.name), result.shape, result.dtype)
        call = self.call(task, *nodes, **attrs)
        if not task.outputs:
            return None
        if len(task.outputs) > 1:
            items = [self.call(operator.getitem, call, i) for i in range(len(task.outputs))]
            return tuple(self.store(operands.get(spec.name), item) for spec, item in zip(task.outputs, items))
        output = operands.get(task.outputs[0].name)
        if output is None or output.attached is None:
            return self.store(output, call)
        assert output.node is not None
        call.update_kwarg("out", output.node)
        call.meta["val"] = output.node.meta["val"]
        output.layout = None
        return output

    def _linear_of_parts(
        self, inputs: Operands, weights: Sequence[GlobalTensor], rows: Interleaved, output: GlobalTensor | None
    ) -> GlobalTensor:
        """A linear layer whose weight is made of others: one for each, so that no weight is copied."""
        x, bias = inputs["x"], inputs["bias"]
        assert x is not None
        columns = Interleaved(1, rows.num_groups, rows.sizes)
        products = []
        for i, weight in enumerate(weights):
            operands = [self.read("x", x), self.read("weight", weight)]
            if bias is not None:
                part = self.part(self.read("bias", bias), rows, i)
                operands.append(self.call(aten.reshape.default, part, [rows.sizes[i]]))
            products.append(self.call(linear, *operands))
        output = self.store(output, self.interleave(products, columns))
        output.layout = columns
        return output

    def packed_task(
        self,
        task: Task,
        packed: GlobalTensor,
        output: GlobalTensor | None,
        attrs: Mapping[str, Any],
        grid_dim: Dim3,
    ) -> GlobalTensor:
        """Append an elementwise task whose operands lie in one tensor: each group of its last dimension has all of them
        in turn. The groups are those in which a linear layer of fused weights wrote it, and the first axis of the grid.
        """
        node, num_parts = self.read("input", packed), len(task.inputs)
        known, last = packed.layout, packed.shape[-1] if packed.shape else 0
        num_groups = known.num_groups if known else 1
        if grid_dim is not None:
            x, *rest = grid = as_grid(self.layer, grid_dim, LEFT_OUT)
            if known and x != num_groups:
                what = f"grid_dim={grid} on {packed.name}, which was written in {num_groups} groups"
                raise GridError(layer=self.layer, what=what, expected=f"({num_groups}, y, z)", advice=LEFT_OUT)
            num_groups = x
            rows = {f"...{i}": size for i, size in enumerate(packed.shape[:-1])}
            check_grid(self.layer, (1, *rest), rows, list(rows))
        if last == 0 or last % (num_parts * num_groups):
            what = f"{packed.name} has {last} columns, which are {num_groups} groups of {num_parts}"
            expected, advice = f"a multiple of {num_parts * num_groups}", "grid_dim[0] is the number of groups"
            raise GridError(layer=self.layer, what=what, expected=expected, advice=advice)
        layout = Interleaved(packed.num_dims - 1, num_groups, (last // num_parts,) * num_parts)
        if known and known != layout:
            what = f"{packed.name} holds {known.sizes} columns of its parts, expected {layout.sizes}"
            raise LayerError(layer=self.layer, what=what)
        shape = [*packed.shape[:-1], last // num_parts]
        parts = [self.call(aten.reshape.default, self.part(node, layout, i), shape) for i in range(num_parts)]
        return self.store(output, self.call(task, *parts, **task.bind_attrs(attrs)))

    def check_grid(self, task: Task, sizes: Sizes, grid_dim: Dim3) -> None:
        check_grid(self.layer, grid_dim, sizes, split_dims(task, sizes))
