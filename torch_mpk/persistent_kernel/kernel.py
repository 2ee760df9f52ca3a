"""``PersistentKernel``: a task graph built layer by layer, compiled as the backend compiles one, and run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import tracing

from torch_mpk import _C, registry
from torch_mpk.builds import timing
from torch_mpk.builds.dump import Dump
from torch_mpk.config import Options, is_int
from torch_mpk.dispatch.admission import check_call
from torch_mpk.dispatch.compiled_graph import CompiledGraph
from torch_mpk.dispatch.fallback import decline_call
from torch_mpk.errors import (
    GradModeError,
    InternalError,
    KernelStateError,
    LayerError,
    MpkError,
    TaskAttributeError,
    TaskError,
    first_line,
)
from torch_mpk.persistent_kernel.builder import Builder, Made
from torch_mpk.persistent_kernel.grid import BLOCKS, check_block
from torch_mpk.persistent_kernel.hints import announce_hints
from torch_mpk.persistent_kernel.layers import Layers
from torch_mpk.persistent_kernel.tb_graph import TBGraph
from torch_mpk.persistent_kernel.tensor import Dim3, GlobalTensor, Interleaved, check_name, is_list_of, kind_of
from torch_mpk.planning import make_plan
from torch_mpk.runtime.backend import backend_of
from torch_mpk.runtime.cpu import num_threads
from torch_mpk.runtime.cuda import absent_target
from torch_mpk.runtime.overlaps import check_apart, memory_of
from torch_mpk.runtime.segment import CompiledSegment
from torch_mpk.warn_once import warn


def get_configurations_from_gpu(rank: int = 0) -> tuple[int, int]:
    """(workers, schedulers) of a device: a worker on each multiprocessor, and no schedulers, because the schedule is
    decided when a kernel is compiled. Where there is no GPU, the threads of the CPU runtime.

    Raises:
        LaunchError: there are GPUs, but none of this rank.
    """
    return (_C.device_info(rank).num_sms if torch.cuda.is_available() else num_threads(Options())), 0


def _check_meta_tensors(meta_tensors: object) -> None:
    """Raises LayerError unless they are tensors by their names, or None."""
    fault = None
    if meta_tensors is not None and not isinstance(meta_tensors, Mapping):
        fault = f"meta_tensors={meta_tensors!r}, expected a dict of tensors by their names"
    for name, tensor in meta_tensors.items() if isinstance(meta_tensors, Mapping) else ():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            fault = f"meta_tensors has {name!r}: {kind_of(tensor)}, expected a name and a torch.Tensor"
    if fault:
        raise LayerError(layer="PersistentKernel", what=fault)


def _check_inputs(layer: str, inputs: object) -> None:
    if not is_list_of(inputs, lambda each: True):
        raise LayerError(layer=layer, what=f"inputs is {kind_of(inputs)}, expected a list of attached tensors")
    if not inputs:
        raise LayerError(layer=layer, what="inputs is empty, expected at least one tensor")


class PersistentKernel(Layers):
    """A program of layers over the caller's tensors: one persistent kernel on CUDA, persistent threads on the CPU.

    ``attach_input`` every tensor that the program reads or writes, call layers in program order, ``compile``, and run
    it as often as wanted; results are in the tensors that were attached as outputs. Each registered task is a method
    ``<task>_layer``, which takes the operands and attributes of its signature by name; the names of Mirage's layers
    work too. Used as a context manager it finalizes at the end.

    The arguments are Mirage's, in its order. Those that are not listed are for programs that give them: a value other
    than the default is announced once, as having no effect.

    Args:
        num_workers: on the CPU a number of threads, of which it takes at most one for each processor. On CUDA there is
            a worker on each multiprocessor, and another number is announced. None: what
            ``get_configurations_from_gpu`` says.
        max_seq_length, max_num_batched_requests, max_num_batched_tokens, max_num_pages, page_size: sizes, which are
            those of the tensors: 1 or more, or None.
        meta_tensors: by name, what describes a batch of requests: "qo_indptr_buffer" and others that layers ask for.
        test_mode: allows ``run_test_mode``.
        options: of the backend, as ``torch.compile`` takes them.

    Raises:
        LayerError: a size is below 1 or no int, or a meta tensor is none.
        OptionError: an option has an unknown name or a wrong value.
    """

    def __init__(
        self,
        mode: str = "offline",
        world_size: int = 1,
        mpi_rank: int = 0,
        num_workers: int | None = None,
        num_local_schedulers: int = 0,
        num_remote_schedulers: int = 0,
        max_seq_length: int | None = None,
        max_num_batched_requests: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_pages: int | None = None,
        page_size: int | None = None,
        meta_tensors: Mapping[str, torch.Tensor] | None = None,
        profiler_tensor: torch.Tensor | None = None,
        trace_name: str | None = None,
        spec_decode_config: object = None,
        use_cutlass_kernel: bool = False,
        eos_token_id: int = -1,
        test_mode: bool = False,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = locals()
        for name in ("num_workers", "page_size", *(name for name in given if name.startswith("max_"))):
            if given[name] is not None and not (is_int(given[name]) and given[name] > 0):
                raise LayerError(layer="PersistentKernel", what=f"{name}={given[name]!r}, expected an int > 0 or None")
        _check_meta_tensors(meta_tensors)
        Options.parse(None, options)
        announce_hints(given, self.get_default_init_parameters())
        self.test_mode, self.num_workers, self.world_size, self.mpi_rank = test_mode, num_workers, world_size, mpi_rank
        self.max_seq_length, self.max_num_pages, self.page_size = max_seq_length, max_num_pages, page_size
        self.max_num_batched_requests = max_num_batched_requests
        self.max_num_batched_tokens = max_num_batched_tokens
        self.meta_tensors = dict(meta_tensors or {})
        self.options = dict(options or {})
        self._builder = Builder(self)
        self._attached: dict[str, torch.Tensor] = {}
        self._names: set[str] = set()
        self._meta: dict[str, GlobalTensor] = {}
        self._checks: list[Callable[[], None]] = []  # of values that a run reads
        self._call: Callable[..., Any] | None = None
        self._compiled: CompiledGraph | None = None
        self._is_finalized = False

    @classmethod
    def get_default_init_parameters(cls) -> dict[str, Any]:
        """The constructor's arguments with their defaults; ``test_mode`` and ``options`` are to be added."""
        parameters = inspect.signature(PersistentKernel).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.name not in ("test_mode", "options")}
        return defaults | {"meta_tensors": {}}

    def __enter__(self) -> PersistentKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.finalize()

    def __repr__(self) -> str:
        state = "finalized" if self._is_finalized else "compiled" if self._compiled else "being built"
        return f"<PersistentKernel of {', '.join(self._attached) or 'nothing'}, {state}>"

    # ---- the device ----

    @property
    def device(self) -> torch.device:
        """Of the attached tensors; before there is one, the current GPU, or the CPU where there is none."""
        for tensor in self._attached.values():
            return tensor.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def target_cc(self) -> int:
        """The device's compute capability, as 90 for 9.0; 0 for the CPU."""
        return _C.device_info(self.device.index).arch if self.device.type == "cuda" else 0

    @property
    def block_dim(self) -> tuple[int, int, int]:
        """What Mirage's programs give for this device: 256 threads from compute capability 9.0, else 128.

        A layer takes either and does what it does anyway: tasks are written for any number of threads.
        """
        return BLOCKS[self.target_cc >= 90]

    # ---- tensors ----

    def attach_input(self, torch_tensor: torch.Tensor, name: str) -> GlobalTensor:
        """A tensor of the caller's as a layer's input or output: it is read and written where it is.

        Raises:
            LayerError: the name is taken or no string, or this is not a dense tensor on the device of the others.
        """
        self._check_building("attach_input")
        check_name("attach_input", name)
        if not isinstance(torch_tensor, torch.Tensor):
            what = (
                f"{name}: expected a torch.Tensor, got {kind_of(torch_tensor)}: torch.as_tensor makes one of an array"
            )
            raise LayerError(layer="attach_input", what=what)
        if torch_tensor.device.type not in ("cpu", "cuda"):
            what = f"{name}: expected a tensor on cpu or cuda, got one on {torch_tensor.device}"
            raise LayerError(layer="attach_input", what=what)
        if torch_tensor.is_quantized or torch_tensor.is_nested:
            kind = "quantized" if torch_tensor.is_quantized else "nested"
            raise LayerError(layer="attach_input", what=f"{name}: expected a plain tensor, got a {kind} one")
        if torch_tensor.layout != torch.strided:
            what = f"{name}: expected a dense tensor, got one of layout {torch_tensor.layout}: attach its to_dense()"
            raise LayerError(layer="attach_input", what=what)
        if self._attached and torch_tensor.device != self.device:
            what = f"{name} is on {torch_tensor.device}, what was attached before on {self.device}: put all on one"
            raise LayerError(layer="attach_input", what=what)
        self._take(name)
        self._attached[name] = torch_tensor
        node = self._builder.placeholder(name, torch_tensor)
        return GlobalTensor(name, tuple(torch_tensor.shape), torch_tensor.dtype, self, torch_tensor, node=node)

    def new_tensor(
        self,
        dims: Sequence[int],
        strides: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        name: str | None = None,
        io_category: str = "cuda_tensor",
    ) -> GlobalTensor:
        """An intermediate tensor: a layer writes it, later ones read it, nobody else sees it.

        It need not exist in memory: layers that hand it over may be fused.

        Args:
            dims: the shape, ints >= 0.
            strides: of a contiguous tensor, or None.
            name: a string that no other tensor has; None for a number.
            io_category: "cuda_tensor"; there is no other.

        Raises:
            LayerError: the name is taken, or an argument has another type or value.
        """
        layer = "new_tensor"
        self._check_building(layer)
        name = self._new_name(layer, name)
        if not is_list_of(dims, lambda size: is_int(size) and size >= 0):
            raise LayerError(layer=layer, what=f"{name}: dims={dims!r}, expected a list of ints >= 0")
        if not isinstance(dtype, torch.dtype):
            raise LayerError(layer=layer, what=f"{name}: dtype={dtype!r}, expected a torch.dtype, as torch.bfloat16")
        shape = tuple(dims)
        contiguous = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        if strides is not None and (not is_list_of(strides, is_int) or [*strides] != contiguous):
            what = f"{name}: strides={strides!r}, expected those of a contiguous tensor, {contiguous}: leave them out"
            raise LayerError(layer=layer, what=what)
        if io_category != "cuda_tensor":
            raise LayerError(layer=layer, what=f"{name}: io_category={io_category!r}, expected 'cuda_tensor'")
        self._take(name)
        return GlobalTensor(name, shape, dtype, self)

    def fuse_tensors(
        self, inputs: Sequence[GlobalTensor], fused_dim: int, num_groups: int, name: str | None = None
    ) -> GlobalTensor:
        """Several tensors as one: group g of ``fused_dim`` is group g of each input in turn.

        Nothing is copied: a linear layer reads such a weight, fused along dimension 0, where its parts are. Other
        layers gather what they read of it at each run.

        Raises:
            LayerError: the inputs differ in more than this dimension, or ``num_groups`` does not divide it.
        """
        return self._fuse("fuse_tensors", inputs, fused_dim, num_groups, name)

    def shuffle_tensors(
        self, inputs: Sequence[GlobalTensor], shuffled_dim: int, num_groups: int, name: str | None = None
    ) -> GlobalTensor:
        """``fuse_tensors`` of inputs of one shape, as the weights of a gate's and an up projection.

        Raises:
            LayerError: see ``fuse_tensors``, or the shapes differ.
        """
        _check_inputs("shuffle_tensors", inputs)
        shapes = {tuple(getattr(tensor, "shape", ())) for tensor in inputs}
        if len(shapes) > 1:
            what = f"{name}: the inputs have shapes {sorted(shapes)}, expected one; fuse_tensors takes several"
            raise LayerError(layer="shuffle_tensors", what=what)
        return self._fuse("shuffle_tensors", inputs, shuffled_dim, num_groups, name)

    def _fuse(
        self, layer: str, inputs: Sequence[GlobalTensor], dim: int, num_groups: int, name: str | None
    ) -> GlobalTensor:
        self._check_building(layer)
        name = self._new_name(layer, name)

        def fail(what: str) -> LayerError:
            return LayerError(layer=layer, what=f"{name}: {what}")

        self._builder.layer = layer
        _check_inputs(layer, inputs)
        for number, tensor in enumerate(inputs):
            self._builder.check(f"inputs[{number}]", tensor)
        first = inputs[0]
        if not is_int(dim) or not 0 <= dim < first.num_dims:
            raise fail(f"dimension {dim!r}, expected 0 to {first.num_dims - 1}")
        shape = list(first.shape)
        for tensor in inputs:
            expected = [*shape[:dim], *tensor.shape[dim : dim + 1], *shape[dim + 1 :]]
            if (tensor.dtype, list(tensor.shape)) != (first.dtype, expected):
                what = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected {first.dtype} {shape}"
                raise fail(f"{what} as {first.name}, but for dimension {dim}")
            if not is_int(num_groups) or num_groups < 1 or tensor.shape[dim] % num_groups:
                raise fail(f"num_groups={num_groups!r}, expected a divisor of {tensor.name}'s {tensor.shape[dim]}")
        self._take(name)
        layout = Interleaved(dim, num_groups, tuple(tensor.shape[dim] for tensor in inputs))
        shape[dim] = sum(layout.sizes)
        return GlobalTensor(name, tuple(shape), first.dtype, self, parts=tuple(inputs), layout=layout)

    def _new_name(self, layer: str, name: str | None) -> str:
        """The one that is given, or a number. Raises LayerError where that is no name."""
        if name is not None:
            check_name(layer, name)
        return name or f"tensor_{len(self._names)}"

    def _take(self, name: str) -> None:
        if name in self._names:
            raise LayerError(layer=repr(self), what=f"there is a tensor {name!r} already: choose another name")
        self._names.add(name)

    # ---- layers ----

    def register_task(self, graph: TBGraph, name: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> Made:
        """Append a task with the operands and partition of a ``TBGraph``; returns its output, or several, or None.

        Args:
            params: the attributes, in the order in which the task declares them, or by name.

        Raises:
            UnknownTaskError: there is no such task.
            TaskError, TaskAttributeError, LayerError, GridError: operands, attributes or partition do not fit it.
        """
        task = registry.get(name)
        if not isinstance(graph, TBGraph):
            raise LayerError(layer=name, what=f"expected a TBGraph, got {kind_of(graph)}: TBGraph(grid_dim) makes one")
        if not isinstance(params, Mapping) and not is_list_of(params, lambda value: True):
            what = f"params={params!r}, expected a list or a dict of {', '.join(task.attrs) or 'nothing'}"
            raise LayerError(layer=name, what=what)
        operands = graph.bind(task)
        output = operands.get(task.outputs[0].name) if task.outputs else None
        builder = self._begin(name, output, graph.block_dim)
        if len(params) > len(task.attrs):
            what = f"{len(params)} params, expected at most {len(task.attrs)}: {', '.join(task.attrs) or 'none'}"
            raise LayerError(layer=name, what=what)
        attrs = params if isinstance(params, Mapping) else dict(zip(task.attrs, params))
        graph.check_partition(task, operands, builder.sizes(task, operands))
        return builder.task(task, operands, attrs)

    def _meta_tensor(self, name: str) -> GlobalTensor:
        """A meta tensor as an input: attached when the first layer asks for it."""
        if name not in self._meta:
            if name not in self.meta_tensors:
                what = (
                    f"it needs the meta tensor {name!r}, int32: pass PersistentKernel(meta_tensors={{{name!r}: ...}})"
                )
                raise LayerError(layer=self._builder.layer, what=what)
            _check_meta_tensors(self.meta_tensors)
            if self.meta_tensors[name].dtype != torch.int32:
                what = f"meta tensor {name!r} is {self.meta_tensors[name].dtype}, expected torch.int32"
                raise LayerError(layer=self._builder.layer, what=what)
            self._meta[name] = self.attach_input(self.meta_tensors[name], name)
        return self._meta[name]

    def _begin(self, layer: str, output: GlobalTensor | None = None, block_dim: Dim3 = None) -> Builder:
        self._check_building(layer)
        self._builder.begin(layer, output)
        check_block(self._builder.layer, block_dim)
        return self._builder

    @contextlib.contextmanager
    def _within(
        self, layer: str, output: GlobalTensor | None = None, **operands: GlobalTensor | None
    ) -> Iterator[Builder]:
        """``_begin``, of a layer that is made of others. ``operands`` are its own, by the names that it has for them.

        An error of a task inside names the layer, too.
        """
        self._check_building(layer)
        with self._builder.within(layer, output):
            for name, tensor in operands.items():
                self._builder.check(name, tensor)
            try:
                yield self._builder
            except (TaskError, TaskAttributeError) as error:
                raise type(error)(f"{layer}: {error}") from None

    def _check_building(self, what: str) -> None:
        if self._is_finalized or self._compiled:
            raise KernelStateError(what=f"{what} after {'finalize' if self._is_finalized else 'compile'}")

    # ---- compiling and running ----

    @property
    def schedule(self) -> _C.Schedule:
        """What ``compile`` has made of the layers: ``.graph`` has the nodes, ``.phases`` their order.

        Raises:
            KernelStateError: it is not compiled, or finalized.
        """
        if self._compiled is None:
            raise KernelStateError(what=f"schedule {'after finalize' if self._is_finalized else 'before compile'}")
        plan = self._compiled.plan
        assert plan is not None and plan.schedule is not None
        return plan.schedule

    def compile(self, output_dir: str | Path | None = None, *, arch: str | None = None) -> None:
        """Schedules the graph, generates and compiles its program, and loads it.

        Args:
            output_dir: folder for the artefacts of each stage (docs/test-mode.md), as TORCH_MPK_DUMP has them for
                models. They are what runs on this device: on the CPU there is no CUDA source among them.
            arch: "sm_80", "sm_90a", "sm_100a" or "sm_120a": a folder of that name in ``output_dir`` gets the schedule
                and the source for an A100, H200, B200 or RTX 5090, which need not be there. Nothing of it is compiled
                or run.

        Raises:
            KernelStateError: there is no layer, or it was compiled before.
            LayerError: ``output_dir`` cannot be written to, or ``arch`` is given without it.
            OptionError: there is no such ``arch``.
            UnsupportedError: a layer cannot be run, or an attached tensor is not a plain one.
            SharedMemoryError: a tensor that is written shares memory with another one.
            CompileError: the device compiler is missing or fails.
        """
        self._check_building("compile")
        graph, tensors = fx.Graph(), list(self._attached.values())
        graph.graph_copy(self._builder.graph, {})
        if all(node.op == "placeholder" for node in graph.nodes):
            raise KernelStateError(what="compile without a layer")
        with torch.no_grad():
            device = check_call(tensors)
        options = self._options(device)
        if arch is not None and output_dir is None:
            raise LayerError(layer="compile", what=f"arch={arch!r} without output_dir: name the folder to write to")
        try:
            dump = Dump.next() if output_dir is None else Dump.at(Path(output_dir))
        except (OSError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is {kind_of(output_dir)}"
            what = f"output_dir={output_dir!r}, expected a folder that can be written to ({why})"
            raise LayerError(layer="compile", what=what) from None
        graph.output(())
        gm = fx.GraphModule(torch.nn.Module(), graph)
        dump.write("2.tasks.txt", lambda: gm.print_readable(print_output=False))
        try:
            with timing.build(), tracing(None):
                if arch is not None and output_dir is not None:
                    make_plan(gm, absent_target(arch, options), options, Dump.at(Path(output_dir) / arch))
                plan = make_plan(gm, backend_of(device).target(device, options), options, dump)
                check_apart(tensors, memory_of(list(self._attached), tensors, plan.written))
                compiled = CompiledGraph({"whole": CompiledSegment(plan, device, options, dump)}, None)
        except MpkError:
            raise
        except Exception as error:
            raise InternalError(first_line(error)) from error
        decline = functools.partial(decline_call, options)
        self._compiled, self._call = compiled, compiled.callable(gm.forward, options.freeze, decline=decline)

    def _options(self, device: torch.device) -> Options:
        workers = self.num_workers
        if workers is None:
            return Options.parse(None, self.options)
        if device.type == "cpu":
            threads = min(workers, max(os.cpu_count() or 1, num_threads(Options())))
            return Options.parse(None, {"num_threads": threads} | self.options)
        expected, _ = get_configurations_from_gpu(device.index)
        if workers != expected:
            warn(f"PersistentKernel(num_workers={workers}) has no effect: there are {expected}, one a multiprocessor")
        return Options.parse(None, self.options)

    def __call__(self) -> None:
        """Run the program once, on the current stream. On CUDA this returns before it is done.

        Raises:
            KernelStateError: it is not compiled, or finalized.
            GradModeError: gradients would have to be recorded.
            IndexRangeError: on the CPU, requests of a paged attention are not what its caches can hold.
            MegakernelTimeout: an earlier run was aborted by the watchdog.
        """
        if self._call is None:
            raise KernelStateError(what=f"a run {'after finalize' if self._is_finalized else 'before compile'}")
        tensors = self._attached.values()
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise GradModeError
        if self.device.type == "cpu":
            self._check_values()
        self._call(*tensors)

    def before_run(self, check: Callable[[], None]) -> None:
        """What looks at values that runs read, and raises where they cannot be used."""
        self._checks.append(check)

    def _check_values(self) -> None:
        for check in self._checks:
            check()

    def run_test_mode(self) -> None:
        """Run the program once: ``self()``, for kernels made with ``test_mode=True``.

        Raises:
            KernelStateError: it was made without, or see ``__call__``.
            IndexRangeError: requests of a paged attention are not what its caches can hold, on CUDA, too, where this
                waits for the tensors that say so.
        """
        if not self.test_mode:
            raise KernelStateError(
                what="run_test_mode without test_mode=True: pass it to the constructor, or call self()"
            )
        if self._call is not None:
            self._check_values()
        self()

    def finalize(self) -> None:
        """Frees the kernel, its workspace and the attached tensors. Runs in flight are waited for."""
        if self._compiled is not None and not self._is_finalized:
            for segment in self._compiled.segments.values():
                segment.synchronize()
        self._is_finalized, self._call, self._compiled = True, None, None
        self._attached.clear()
        self._checks.clear()
        self._builder = Builder(self)
