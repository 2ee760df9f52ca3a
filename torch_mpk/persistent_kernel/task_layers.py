"""A layer for each registered task, made from its signature. ``stub`` is task_layers.pyi."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch_mpk import registry
from torch_mpk.errors import TaskAttributeError
from torch_mpk.persistent_kernel.tensor import GlobalTensor
from torch_mpk.registry import Operand, Task

_LAUNCH = ("grid_dim", "block_dim")
_RESULTS, _SEVERAL = {0: "None", 1: GlobalTensor.__name__}, f"tuple[{GlobalTensor.__name__}, ...]"


_MIRAGES = ("paged_attention",)  # whose layer of that name does more, and stands in layers.py


class TaskLayers:
    """``<task>_layer`` for every task that is registered, now or later, and that ``has_layer``."""


def layer_name(task: Task) -> str:
    return f"{task.name}_layer"


def has_layer(task: Task) -> bool:
    """Whether there is one that is the task alone."""
    return task.name not in _MIRAGES


def is_packable(task: Task) -> bool:
    """Whether the task combines alike operands element by element, so that one tensor may hold them all."""
    alike = {operand.dims for operand in (*task.inputs, *task.outputs)} == {("...",)}
    required = not any(operand.optional for operand in task.inputs)
    return task.role == "pointwise" and len(task.inputs) > 1 and len(task.outputs) == 1 and alike and required


def _names(task: Task, mirage: bool) -> dict[str, str]:
    """What the layer calls each operand that it takes, by its name in the signature."""
    names = {spec.name: spec.name for spec in (*task.inputs, *task.outputs)}
    if not mirage:
        return names
    if is_packable(task):
        names = {spec.name: spec.name for spec in (task.inputs[0], *task.outputs)}
    for specs, name in ((task.inputs[:1], "input"), (task.outputs if len(task.outputs) == 1 else [], "output")):
        if name not in names.values():
            names |= {spec.name: name for spec in specs}
    return names


def signature(task: Task, mirage: bool = False) -> inspect.Signature:
    """What the layer takes, all by name: the operands, outputs among them, the attributes, and the launch.

    ``mirage``: as Mirage's layers have them. ``input`` is the first operand and ``output`` the result, and what is
    neither an optional operand nor an attribute may be given by position.
    """

    def parameter(name: str, annotation: str, default: Any, is_positional: bool) -> inspect.Parameter:
        is_positional = is_positional and mirage
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    def operand(spec: Operand, name: str) -> inspect.Parameter:
        may_be_none = spec.optional or not spec.is_read
        annotation = f"{GlobalTensor.__name__}{' | None' if may_be_none else ''}"
        return parameter(name, annotation, None if may_be_none else inspect.Parameter.empty, not spec.optional)

    names = _names(task, mirage)
    parameters = [operand(spec, names[spec.name]) for spec in (*task.inputs, *task.outputs) if spec.name in names]
    parameters += [parameter(attr.name, attr.type.__name__, attr.default, False) for attr in task.attrs.values()]
    parameters += [parameter(name, "Dim3", None, True) for name in _LAUNCH]
    parameters.sort(key=lambda parameter: parameter.kind)
    return inspect.Signature(parameters, return_annotation=_RESULTS.get(len(task.outputs), _SEVERAL))


def _documentation(task: Task) -> str:
    lines = [inspect.cleandoc(task.__doc__ or f"The task ``{task.name}``."), "", f"Signature: ``{task.signature}``."]
    lines += [f"Mirage's form, also by position: ``{_parameters(signature(task, mirage=True))}``."]
    if is_packable(task):
        packed = " and ".join(f"``{operand.name}``" for operand in task.inputs)
        lines += [
            f"Each group of the last dimension of its ``input`` holds {packed}.",
            "There are as many groups as ``fuse_tensors`` made of the weight that ``input`` comes from, else",
            "``grid_dim[0]``, else one.",
        ]
    if task.outputs:
        lines += ["Returns what it writes: a new intermediate tensor where that is left out."]
    return "\n".join(lines)


def _layer(task: Task) -> Callable[..., Any]:
    name, forms = layer_name(task), [signature(task), signature(task, mirage=True)]

    def layer(self: Any, *tensors: Any, **given: Any) -> Any:
        own, mirage = forms
        form = mirage if tensors or given.keys() & mirage.parameters.keys() - own.parameters.keys() else own
        try:
            values = form.bind(*tensors, **given)
        except TypeError as error:
            expected = f"{_parameters(own)} or {_parameters(mirage)}"
            raise TaskAttributeError(f"{name}: {error}; expected {expected} (signature: {task.signature})") from None
        values.apply_defaults()
        grid_dim, block_dim = (values.arguments.pop(key) for key in _LAUNCH)
        attrs = {key: values.arguments.pop(key) for key in task.attrs}
        called = _names(task, form is mirage)
        operands = {operand: values.arguments[called[operand]] for operand in called}
        output = operands.get(task.outputs[0].name) if task.outputs else None
        builder = self._begin(name, output, block_dim)
        for operand, tensor in operands.items():
            if tensor is not None:
                builder.check(called[operand], tensor)
        if form is mirage and is_packable(task):
            return builder.packed_task(task, operands[task.inputs[0].name], output, attrs, grid_dim)
        builder.check_grid(task, builder.sizes(task, operands), grid_dim)
        return builder.task(task, operands, attrs)

    layer.__name__, layer.__qualname__ = name, f"PersistentKernel.{name}"
    layer.__doc__ = _documentation(task)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    layer.__signature__ = forms[0].replace(parameters=[this, *forms[0].parameters.values()])  # type: ignore[attr-defined]
    return layer


def _parameters(form: inspect.Signature) -> str:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    by_position, by_name = ([name for name, p in form.parameters.items() if p.kind is kind] for kind in kinds)
    return f"({', '.join([*by_position, '*', *by_name] if by_name else by_position)})"


def _add(task: Task) -> None:
    if has_layer(task):
        setattr(TaskLayers, layer_name(task), _layer(task))


registry.subscribe(_add)


def stub(tasks: Iterable[Task]) -> str:
    """The declarations of the tasks' layers, for type checkers and editors."""
    return "\n".join(_stub_lines(tasks)) + "\n"


def _stub_lines(tasks: Iterable[Task]) -> Iterator[str]:
    yield "# python docs/reference.py writes this file"
    yield "from collections.abc import Iterable"
    yield from ("from typing import Any, overload", "")
    yield f"from {GlobalTensor.__module__} import Dim3, {GlobalTensor.__name__}"
    yield from ("from torch_mpk.registry import Task", "")
    for function in (stub, is_packable):
        yield f"def {function.__name__}{inspect.signature(function)}: ...".replace("'", "")
    yield from ("", "class TaskLayers:")
    yield "    def _meta_tensor(self, name: str) -> GlobalTensor: ..."
    yield "    def _begin(self, layer: str, output: GlobalTensor | None = ..., block_dim: Dim3 = ...) -> Any: ..."
    yield "    def _within(self, layer: str, output: GlobalTensor | None = ..., **operands: Any) -> Any: ..."
    for task in sorted(filter(has_layer, tasks), key=lambda task: task.name):
        for form in (signature(task), signature(task, mirage=True)):
            yield "    @overload"
            yield f"    def {layer_name(task)}("
            yield "        self,"
            is_positional = True
            for parameter in form.parameters.values():
                if is_positional and parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    is_positional = False
                    yield "        *,"
                default = "" if parameter.default is inspect.Parameter.empty else " = ..."
                yield f"        {parameter.name}: {parameter.annotation}{default},"
            yield f"    ) -> {form.return_annotation}: ..."
    yield "    def __getattr__(self, name: str) -> Any: ...  # layers of other packages' tasks"
