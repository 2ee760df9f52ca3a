"""What is compiled of single kernels: a source, and behind it what instantiates and checks the functions launched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mpk.jit.declaration import Declaration
from torch_mpk.jit.launch import Launch


@dataclass(frozen=True)
class Entry:
    """A function of a translation unit, instantiated and checked against what its launch passes."""

    declaration: Declaration
    launch: Launch
    function: str  # with its template arguments
    index: int  # in the unit

    @property
    def kernel_name(self) -> str:
        """Of a CUDA kernel that stands for a member function."""
        return f"{self.declaration.name}_{self.launch.path[-1]}_{self.index}"

    def text(self, values: dict[str, Any]) -> str:
        P = f"mpk_launch_{self.index}::P"  # noqa: N806
        num_parameters = self.launch.num_parameters
        checks = [f'static_assert(P::count == {num_parameters}, "the launch passes {num_parameters} arguments");']
        for i in self.launch.structs:
            what = f"parameter {i + 1}: {{...}} is passed, declare it a trivially copyable struct of standard layout"
            checks.append(f'static_assert(mpk::jit::is_struct<P::at<{i}>>, "{what}, by value");')
        fields = []
        for argument, kind, what, type_ in self.declaration.parameters(self.launch, values):
            type_of, place = f"P::at<{argument.parameter}>", f"parameter {argument.parameter + 1}"
            if argument.field is not None:
                field = f"mpk::jit::lvalue<{type_of}>().{argument.field}"
                offset = f"__builtin_offsetof({P}::at<{argument.parameter}>, {argument.field})"
                fields.append((offset, f"sizeof({field.replace('P::', f'{P}::', 1)})"))
                type_of, place = f"decltype(mpk::jit::by_value({field}))", f"{place}'s {argument.field}"
            check = f"mpk::jit::accepts<mpk::jit::{kind}, {type_of}>"
            checks.append(f'static_assert({check}, "{place}: {what}, declare it {type_}");')
        instantiate = self._cuda if self.declaration.is_cuda else self._cpu
        return "\n".join(
            [
                f'#line 1 "launch of {self.declaration.name}"',
                f"namespace mpk_launch_{self.index} {{ using P = mpk::jit::Parameters<decltype(&{self.function})>;",
                *checks,
                "}",
                *instantiate([f"int({number})" for field in fields for number in field]),
            ]
        )

    def _cpu(self, fields: Sequence[str]) -> Iterator[str]:
        export = 'extern "C" __attribute__((visibility("default")))'
        entry = f"mpk_launch_{self.index}::entry"
        yield f"namespace mpk_launch_{self.index} {{ using entry = mpk::jit::Entry<&{self.function}>;"
        yield f"constexpr int fields[] = {{{', '.join([*fields, '-1'])}}}; }}"
        yield f"{export} void mpk_run{self.index}(void** parameters) {{ {entry}::run(parameters); }}"
        yield f"{export} const int* mpk_parameter_bytes{self.index}() {{ return {entry}::bytes; }}"
        yield f"{export} const int* mpk_fields{self.index}() {{ return mpk_launch_{self.index}::fields; }}"

    def _cuda(self, fields: Sequence[str]) -> Iterator[str]:
        # Whoever refers to a kernel's template instantiates it.
        name, refer = self.kernel_name, f"void* mpk_kernel_{self.index}()"
        if self.launch.is_member:
            yield f"template <class... P> __global__ void {name}(P... p) {{ {self.function}(p...); }}"
            yield f"template <class... P> void* mpk_kernel_{name}(void (*)(P...)) {{ return (void*)&{name}<P...>; }}"
            yield f"{refer} {{ return mpk_kernel_{name}((decltype(&{self.function}))nullptr); }}"
        else:
            yield f"{refer} {{ return (void*)&{self.function}; }}"
        # The host learns where a struct's fields are from the name of a kernel that is never launched.
        if fields:
            yield f"template <int...> __global__ void mpk_fields_{self.index}() {{}}"
            yield f"template __global__ void mpk_fields_{self.index}<{', '.join(fields)}>();"

    def symbol(self, symbols: Sequence[str]) -> str:
        path = (self.kernel_name,) if self.launch.is_member else self.launch.path
        # A mangled name has its parts behind their lengths.
        mangled = ".*".join(rf"(?<!\d){len(name)}{name}(?![a-z_])" for name in path)
        found = [s for s in symbols if s == path[-1] or re.search(mangled, s)]
        if len(found) != 1:
            name = "::".join(path)
            self.declaration.fail(f"the source has {len(found)} kernels {name} ({', '.join(symbols)}), expected one")
        return found[0]

    def fields(self, symbols: Sequence[str]) -> list[tuple[int, int]]:
        """The offsets and sizes that ``mpk_fields`` is named after."""
        mine = [s.partition(f"mpk_fields_{self.index}I")[2] for s in symbols]
        numbers = [int(number) for number in re.findall(r"Li(\d+)E", "".join(mine))]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


@dataclass(frozen=True)
class Unit:
    """What is compiled at once."""

    source: str
    entries: list[Entry]
    names: tuple[str, ...]  # of the kernels
