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

    def is_unknown(self, errors: str) -> bool:
        """Whether a compiler's first error is that there is no such function."""
        first = next((line for line in errors.splitlines() if "error" in line), "")
        return re.match(rf"launch of {self.declaration.name}[:(]1[:)]", first) is not None

    def text(self, values: dict[str, Any]) -> str:
        P = f"mpk_launch_{self.index}::P"  # noqa: N806
        num_parameters = self.launch.num_parameters
        checks = [f'static_assert(P::count == {num_parameters}, "the launch passes {num_parameters} arguments");']
        for i in self.launch.structs:
            what = f"parameter {i + 1}: {{...}} is passed, declare it a trivially copyable struct of standard layout"
            checks.append(f'static_assert(mpk::jit::is_struct<P::at<{i}>>, "{what}, by value");')
        places = []
        for argument, kind, what, type_ in self.declaration.parameters(self.launch, values):
            offset, type_of = "0", f"P::at<{argument.parameter}>"
            place = f"parameter {argument.parameter + 1}"
            if argument.field is not None:
                offset = f"__builtin_offsetof({type_of}, {argument.field})"
                field = f"mpk::jit::lvalue<{type_of}>().{argument.field}"
                type_of, place = f"decltype(mpk::jit::by_value({field}))", f"{place}'s {argument.field}"
            check = f"mpk::jit::accepts<mpk::jit::{kind}, {type_of}>"
            checks.append(f'static_assert({check}, "{place}: {what}, declare it {type_}");')
            bits = f"mpk::jit::integer_bits<{type_of}>"
            places += [number.replace("P::", f"{P}::") for number in (offset, f"sizeof({type_of})", bits)]
        instantiate = self._cuda if self.declaration.is_cuda else self._cpu
        return "\n".join(
            [
                f'#line 1 "launch of {self.declaration.name}"',
                f"namespace mpk_launch_{self.index} {{ using P = mpk::jit::Parameters<decltype(&{self.function})>;",
                *checks,
                "}",
                *instantiate([f"int({number})" for number in places]),
            ]
        )

    def _cpu(self, places: Sequence[str]) -> Iterator[str]:
        export = 'extern "C" __attribute__((visibility("default")))'
        entry = f"mpk_launch_{self.index}::entry"
        yield f"namespace mpk_launch_{self.index} {{ using entry = mpk::jit::Entry<&{self.function}>;"
        yield f"constexpr int places[] = {{{', '.join([*places, '-1'])}}}; }}"
        yield f"{export} void mpk_run{self.index}(void** parameters) {{ {entry}::run(parameters); }}"
        yield f"{export} const int* mpk_parameter_bytes{self.index}() {{ return {entry}::bytes; }}"
        yield f"{export} const int* mpk_arguments{self.index}() {{ return mpk_launch_{self.index}::places; }}"

    def _cuda(self, places: Sequence[str]) -> Iterator[str]:
        # Whoever refers to a kernel's template instantiates it.
        name, refer = self.kernel_name, f"void* mpk_kernel_{self.index}()"
        if self.launch.is_member:
            yield f"template <class... P> __global__ void {name}(P... p) {{ {self.function}(p...); }}"
            yield f"template <class... P> void* mpk_kernel_{name}(void (*)(P...)) {{ return (void*)&{name}<P...>; }}"
            yield f"{refer} {{ return mpk_kernel_{name}((decltype(&{self.function}))nullptr); }}"
        else:
            yield f"{refer} {{ return (void*)&{self.function}; }}"
        # The host learns where fields are, and what is unsigned, from the name of a kernel that is never launched.
        name = f"mpk_arguments_{self.index}"
        is_told = "true" if self.launch.structs else "mpk::jit::has_unsigned<places...>"
        yield f"template <int... places> __global__ void {name}() {{}}"
        yield f"template <int... places> void* {name}_told() {{"
        yield f"  if constexpr ({is_told}) return (void*)&{name}<places...>; else return nullptr; }}"
        yield f"void* {name}_used() {{ return {name}_told<{', '.join(places)}>(); }}"

    def symbol(self, symbols: Sequence[str]) -> str:
        path = (self.kernel_name,) if self.launch.is_member else self.launch.path
        # A mangled name has its parts behind their lengths.
        mangled = ".*".join(rf"(?<!\d){len(name)}{name}(?![a-z_])" for name in path)
        found = [s for s in symbols if s == path[-1] or re.search(mangled, s)]
        if len(found) != 1:
            name = "::".join(path)
            self.declaration.fail(f"the source has {len(found)} kernels {name} ({', '.join(symbols)}), expected one")
        return found[0]

    def arguments(self, symbols: Sequence[str]) -> list[tuple[int, int, int]]:
        """The offsets, bytes and integers' bits that ``mpk_arguments`` is named after; none where each argument is a
        parameter, and no integer unsigned."""
        mine = [s.partition(f"mpk_arguments_{self.index}I")[2] for s in symbols]
        numbers = [int(number.replace("n", "-")) for number in re.findall(r"Li(n?\d+)E", "".join(mine))]
        return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


@dataclass(frozen=True)
class Unit:
    """What is compiled at once."""

    source: str
    entries: list[Entry]
    names: tuple[str, ...]  # of the kernels
