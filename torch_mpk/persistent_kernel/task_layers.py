"""A layer for each registered task, made from its signature. ``stub`` writes task_layers.pyi."""

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


class TaskLayers:
    """``<task>_layer`` for every task that is registered, now or later."""


def layer_name(task: Task) -> str:
    return f"{task.name}_layer"


def is_packable(task: Task) -> bool:
    """Whether the task combines alike operands element by element, so that one tensor may hold them all."""
    alike = {operand.dims for operand in (*task.inputs, *task.outputs)} == {("...",)}
    required = not any(operand.optional for operand in task.inputs)
    return task.role == "pointwise" and len(task.inputs) > 1 and len(task.outputs) == 1 and alike and required


def signature(task: Task, mirage: bool = False) -> inspect.Signature:
    """What the layer takes, all by name: the operands, outputs among them, the attributes, and the launch.

    ``mirage``: by the names of Mirage's layers, in which ``input`` is the first operand and ``output`` the result.
    """

    def keyword(name: str, annotation: str, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def operand(spec: Operand, name: str) -> inspect.Parameter:
        optional = spec.optional or not spec.is_read
        kind = GlobalTensor.__name__
        return keyword(name, f"{kind} | None", None) if optional else keyword(name, kind)

    names = {spec.name: spec.name for spec in (*task.inputs, *task.outputs)}
    inputs = list(task.inputs)
    if mirage:
        inputs = inputs[:1] if is_packable(task) else inputs
        names |= {spec.name: "input" for spec in inputs[:1]}
        names |= {spec.name: "output" for spec in task.outputs if len(task.outputs) == 1}
    parameters = [operand(spec, names[spec.name]) for spec in (*inputs, *task.outputs)]
    parameters += [keyword(attr.name, attr.type.__name__, attr.default) for attr in task.attrs.values()]
    parameters += [keyword(name, "Dim3", None) for name in _LAUNCH]
    return inspect.Signature(parameters, return_annotation=_RESULTS.get(len(task.outputs), _SEVERAL))


def _documentation(task: Task) -> str:
    lines = [inspect.cleandoc(task.__doc__ or f"The task ``{task.name}``."), "", f"Signature: ``{task.signature}``."]
    if is_packable(task):
        packed = " and ".join(f"``{operand.name}``" for operand in task.inputs)
        lines += [
            f"Mirage's form is ``(input, output)``: each group of the last dimension of ``input`` holds {packed}.",
            "There are as many groups as ``fuse_tensors`` made of the weight that ``input`` comes from, else",
            "``grid_dim[0]``, else one.",
        ]
    else:
        output = f", ``output`` for ``{task.outputs[0].name}``" if len(task.outputs) == 1 else ""
        lines += [f"``input`` may be written for ``{task.inputs[0].name}``{output}, as in Mirage."]
    if task.outputs:
        lines += ["Returns what it writes: a new intermediate tensor where that is left out."]
    return "\n".join(lines)


def _layer(task: Task) -> Callable[..., Any]:
    name, forms = layer_name(task), [signature(task), signature(task, mirage=True)]

    def layer(self: Any, **given: Any) -> Any:
        own, mirage = forms
        form = mirage if given.keys() & mirage.parameters.keys() - own.parameters.keys() else own
        try:
            values = form.bind(**given)
        except TypeError as error:
            expected = f"{_parameters(own)} or {_parameters(mirage)}"
            raise TaskAttributeError(f"{name}: {error}; expected {expected} (signature: {task.signature})") from None
        values.apply_defaults()
        grid_dim, block_dim = (values.arguments.pop(key) for key in _LAUNCH)
        attrs = {key: values.arguments.pop(key) for key in task.attrs}
        tensors = list(values.arguments.values())
        output = tensors[-len(task.outputs)] if task.outputs else None
        builder = self._begin(name, output, block_dim)
        if form is mirage and is_packable(task):
            return builder.packed_task(task, tensors[0], output, attrs, grid_dim)
        operands = dict(zip((spec.name for spec in (*task.inputs, *task.outputs)), tensors))
        builder.check_grid(task, builder.sizes(task, operands), grid_dim)
        return builder.task(task, operands, attrs)

    layer.__name__, layer.__qualname__ = name, f"PersistentKernel.{name}"
    layer.__doc__ = _documentation(task)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    layer.__signature__ = forms[0].replace(parameters=[this, *forms[0].parameters.values()])  # type: ignore[attr-defined]
    return layer


def _parameters(form: inspect.Signature) -> str:
    return f"({', '.join(form.parameters)})"


def _add(task: Task) -> None:
    setattr(TaskLayers, layer_name(task), _layer(task))


registry.subscribe(_add)


def stub(tasks: Iterable[Task]) -> str:
    """The declarations of the tasks' layers, for type checkers and editors."""
    return "\n".join(_stub_lines(tasks)) + "\n"


def _stub_lines(tasks: Iterable[Task]) -> Iterator[str]:
    yield "# python -m torch_mpk stub > torch_mpk/persistent_kernel/task_layers.pyi"
    yield "from collections.abc import Iterable"
    yield from ("from typing import Any, overload", "")
    yield f"from {GlobalTensor.__module__} import Dim3, {GlobalTensor.__name__}"
    yield from ("from torch_mpk.registry import Task", "")
    for function in (stub, is_packable):
        yield f"def {function.__name__}{inspect.signature(function)}: ...".replace("'", "")
    yield from ("", "class TaskLayers:")
    yield "    def _meta_tensor(self, name: str) -> GlobalTensor: ..."
    yield "    def _begin(self, layer: str, output: GlobalTensor | None = ..., block_dim: Dim3 = ...) -> Any: ..."
    for task in sorted(tasks, key=lambda task: task.name):
        for form in (signature(task), signature(task, mirage=True)):
            yield "    @overload"
            yield f"    def {layer_name(task)}("
            yield "        self,"
            yield "        *,"
            for parameter in form.parameters.values():
                default = "" if parameter.default is inspect.Parameter.empty else " = ..."
                yield f"        {parameter.name}: {parameter.annotation}{default},"
            yield f"    ) -> {form.return_annotation}: ..."
    yield "    def __getattr__(self, name: str) -> Any: ...  # layers of other packages' tasks"
