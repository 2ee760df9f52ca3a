"""Generations of GPUs are objects, which say what each has."""

from __future__ import annotations

import pytest

from tests.schedule.decoder_graph import decoder
from torch_mpk import _C


def test_each_known_device_runs_the_code_of_one_generation() -> None:
    archs = _C.archs()
    assert [arch.number for arch in archs] == [80, 90, 100, 120]
    devices = [device for arch in archs for device in arch.devices]
    assert devices == sorted(set(devices))
    for arch in archs:
        assert arch.devices[0] == arch.number
        assert _C.arch_of(arch.number).number == arch.number
        assert all(_C.arch_of_device(device).number == arch.number for device in arch.devices)


@pytest.mark.parametrize(("capability", "number"), [(75, None), (81, 80), (95, 80), (130, 120)])
def test_an_unknown_device_runs_what_the_newest_before_it_says_without_instructions_of_its_own(
    capability: int, number: int | None
) -> None:
    arch = _C.arch_of_device(capability)
    assert (arch.number if arch else None) == number


@pytest.mark.parametrize(
    ("number", "has"),
    [
        (80, set()),
        (90, {"bulk_copies", "warpgroup_products", "clusters"}),
        (100, {"bulk_copies", "clusters"}),
        (120, {"bulk_copies", "clusters"}),
    ],
)
def test_hopper_alone_multiplies_by_warpgroups(number: int, has: set[str]) -> None:
    arch = _C.arch_of(number)
    assert {name for name in ("bulk_copies", "warpgroup_products", "clusters") if getattr(arch, f"has_{name}")} == has
    assert arch.moves_registers == arch.overlaps_launches == bool(has)


def test_what_is_compiled_for_a_device_runs_on_it() -> None:
    assert [_C.compiled_name(n) for n in (80, 89, 90, 103, 121)] == ["sm_80", "sm_89", "sm_90a", "sm_103a", "sm_121a"]
    assert _C.compiled_name(90, as_ptx=True) == "sm_90"
    runs = [
        (compiled, device)
        for compiled in (80, 86, 90, 100)
        for device in (80, 86, 90, 103)
        if _C.runs_on(compiled, device)
    ]
    assert runs == [(80, 80), (80, 86), (86, 86), (90, 90)]
    assert _C.capability_text(120) == "12.0"


@pytest.mark.parametrize(
    ("capability", "numbers"),
    [
        (75, []),
        (86, [80]),
        (90, [80, 90, 100, 120]),
        (103, [80, 100, 120]),
        (121, [80, 100, 120]),
        (130, [80, 100, 120]),
    ],
)
def test_a_device_can_run_the_code_of_which_it_has_all_instructions(capability: int, numbers: list[int]) -> None:
    assert [arch.number for arch in _C.archs() if _C.can_run(capability, arch)] == numbers


def test_a_target_of_no_known_generation_is_refused() -> None:
    expected = "no kernels are generated for arch 95: expected 80, 90, 100 or 120"
    with pytest.raises(ValueError, match=expected):
        _C.make_schedule(decoder(layers=1), _C.Target("cuda", 95, 132, 232448))


def test_costs_that_were_not_measured_say_so() -> None:
    assert {arch.number: arch.measured_on for arch in _C.archs()} == {80: "", 90: "H200", 100: "", 120: ""}
