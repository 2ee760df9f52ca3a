"""The CPU's attention of ragged sequences against its reference, in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from tests.cpu.net import FLOATS, ISAS, TOLERANCE, Net, rms_error
from torch_mpk.errors import TaskError
from torch_mpk.tasks.varlen_attention import varlen_attention as reference

NAMES = ("q", "k_new", "v_new", "k_cache", "v_cache", "read_index", "cu_seq_lens_q", "cu_seq_lens_k", "sinks")

# tokens of each sequence, what the cache has of it, heads, key heads, head size, tokens behind the last sequence
CASES = [
    ([70, 1, 0, 130, 1], [0, 300, 40, 65, 0], 6, 2, 64, 9),
    ([1] * 20, range(0, 400, 20), 4, 4, 16, 12),
    ([200], [0], 3, 1, 80, 0),
    ([], [], 2, 2, 5, 7),
    ([3, 5], [0, 9], 200, 1, 8, 2),
]


def operands_of(
    tokens: list[int], cached: list[int], heads: int, groups: int, dim: int, padding: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Rows of a cache in any order, between others. ``read_index`` names none of the new tokens'."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    total, held = sum(tokens) + padding, sum(cached)
    lengths = [t + c for t, c in zip(tokens, cached)]
    read_index = torch.full([sum(lengths) + 11], -(2**40))  # the engine's names rows for these, too
    rows = iter(torch.randperm(held + 30)[:held].tolist())
    for begin, count in zip(accumulate(lengths, initial=0), cached):
        read_index[begin : begin + count] = torch.tensor([next(rows) for _ in range(count)])
    return {
        "q": random(total, heads, dim),
        **{n: random(total, groups, dim) for n in ("k_new", "v_new")},
        **{n: random(held + 30, groups, dim) for n in ("k_cache", "v_cache")},
        "read_index": read_index,
        "cu_seq_lens_q": torch.tensor([*accumulate(tokens, initial=0)], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32),
    }


def net_of(operands: dict[str, torch.Tensor], scale: float, window: int, softcap: float = 0.0) -> Net:
    net = Net()
    y = net.output(torch.empty(*operands["q"].shape[:2], operands["v_cache"].shape[2], dtype=operands["q"].dtype))
    attrs = {"scale": scale, "window": window, "softcap": softcap}
    net.node("varlen_attention", attrs, **{n: net.input(operands[n]) for n in NAMES if n in operands}, y=y)
    return net


def check(operands: dict[str, torch.Tensor], window: int = 0, isa: str = "", softcap: float = 0.0) -> torch.Tensor:
    scale, dtype = operands["q"].shape[-1] ** -0.5, operands["q"].dtype
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in map(operands.get, NAMES)]
    [y] = net_of(operands, scale, window, softcap).run(isa=isa)
    # The weights are rounded to q's dtype before they meet the values, and so is the result.
    assert rms_error(y, reference(*wide, scale=scale, window=window, softcap=softcap)) < 2 * TOLERANCE[dtype]
    return y


def alone(operands: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Of one sequence."""
    (q0, q1), (k0, k1) = (list(pairwise(operands[f"cu_seq_lens_{n}"].tolist()))[i] for n in "qk")
    own = {n: operands[n][q0:q1] for n in ("q", "k_new", "v_new")}
    ends = {"cu_seq_lens_q": [0, q1 - q0], "cu_seq_lens_k": [0, k1 - k0]}
    return (
        operands
        | own
        | {"read_index": operands["read_index"][k0:k1].clamp_min(0)}
        | {n: torch.tensor(t, dtype=torch.int32) for n, t in ends.items()}
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_sequences(isa: str, dtype: torch.dtype, case: tuple) -> None:
    operands = operands_of(*case, dtype)
    y = check(operands, isa=isa)
    assert not y[operands["cu_seq_lens_q"][-1] :].any()
    check(operands, window=50, isa=isa)
    check(operands, window=1, isa=isa)
    sinks = torch.randn(operands["q"].shape[1]).to(dtype) + 2
    wider = {n: torch.cat((operands[n], operands[n][..., :3]), -1) for n in ("v_new", "v_cache")}
    check(operands | wider | {"sinks": sinks}, window=60, isa=isa, softcap=1.5)


def test_the_reference_is_attention_of_each_sequence() -> None:
    operands = operands_of(*CASES[0], torch.float64)
    for window in (0, 40):
        y = reference(*map(operands.get, NAMES), scale=0.2, window=window)
        (ends_q, ends_k) = (operands[f"cu_seq_lens_{n}"].tolist() for n in "qk")
        for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k)):
            rows = operands["read_index"][k0 : k1 - (q1 - q0)]
            k, v = (
                torch.cat((operands[f"{n}_cache"][rows], operands[f"{n}_new"][q0:q1])).transpose(0, 1) for n in "kv"
            )
            behind = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
            wanted = torch.nn.functional.scaled_dot_product_attention(
                *(operands["q"][q0:q1].transpose(0, 1), k, v),
                attn_mask=(behind >= 0) & (behind < (window or k1)),
                scale=0.2,
                enable_gqa=True,
            )
            torch.testing.assert_close(y[q0:q1], wanted.transpose(0, 1))
        assert not y[ends_q[-1] :].any()


@pytest.mark.parametrize("window", [0, 40])
def test_the_reference_is_the_same_in_blocks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = operands_of(*CASES[0], torch.float64)
    whole = reference(*map(operands.get, NAMES), scale=0.2, window=window)
    num_keys = len(operands["read_index"]) + len(operands["q"])
    monkeypatch.setattr("torch_mpk.tasks.varlen_attention.MOST_SCORES", 17 * 6 * num_keys)  # 6 heads
    largest: list[int] = []
    softmax = torch.Tensor.softmax

    def seen(scores: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        largest.append(scores.numel())
        return softmax(scores, dim, dtype)

    monkeypatch.setattr(torch.Tensor, "softmax", seen)
    in_blocks = reference(*map(operands.get, NAMES), scale=0.2, window=window)
    torch.testing.assert_close(in_blocks, whole)
    assert max(largest) == 17 * 6 * num_keys and len(largest) == 13


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [0, 70])
def test_a_sequence_has_the_bits_that_it_has_alone(isa: str, dtype: torch.dtype, window: int) -> None:
    operands = operands_of(*CASES[0], dtype)
    net = net_of(operands, 0.2, window)
    net.assert_same_bits(isa)
    [whole] = net.run(isa=isa)
    ends = operands["cu_seq_lens_q"].tolist()
    for i, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            [y] = net_of(alone(operands, i), 0.2, window).run(isa=isa)
            assert torch.equal(y, whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
def test_what_no_sequence_sees_is_not_read(isa: str) -> None:
    operands = operands_of(*CASES[0], torch.bfloat16)
    wanted = check(operands, window=40, isa=isa)
    seen = torch.cat([alone(operands, i)["read_index"][:c] for i, c in enumerate(CASES[0][1])])
    for cache in ("k_cache", "v_cache"):
        unseen = torch.ones(len(operands[cache]), dtype=torch.bool)
        unseen[seen] = False
        operands[cache][unseen] = torch.nan
    for new in ("k_new", "v_new"):
        operands[new][operands["cu_seq_lens_q"][-1] :] = torch.nan
    [y] = net_of(operands, operands["q"].shape[-1] ** -0.5, 40).run(isa=isa)
    assert torch.equal(y, wanted)


def test_strides() -> None:
    operands = operands_of(*CASES[0], torch.float32)
    operands["q"] = torch.randn(6, 211, 100)[..., 8:72].transpose(0, 1)
    operands["k_new"] = torch.randn(2, 211, 64).transpose(0, 1)
    operands["v_cache"] = torch.randn(len(operands["v_cache"]), 3, 2, 64)[:, 1]
    check(operands)


def test_what_is_refused() -> None:
    operands = operands_of(*CASES[0], torch.float32)
    odd = {n: torch.randn(9, 4, 64) for n in NAMES if n[:2] in ("k_", "v_")}
    odd |= {n: torch.randn(len(operands["q"]), 4, 64) for n in ("k_new", "v_new")}
    with pytest.raises(TaskError, match="q has H=6, expected a multiple of k_cache's G=4"):
        reference(*map({**operands, **odd}.get, NAMES), scale=1.0)
    with pytest.raises(TaskError, match="window=-1, expected a number of keys, or 0 for all of them"):
        reference(*map(operands.get, NAMES), scale=1.0, window=-1)
    with pytest.raises(TaskError, match=r"softcap=-1.0, expected a bound of scores, or 0 for none"):
        reference(*map(operands.get, NAMES), scale=1.0, softcap=-1.0)
    wide = operands | {"cu_seq_lens_q": operands["cu_seq_lens_q"].long()}
    with pytest.raises(ValueError, match=r"varlen_attention \(node\): cu_seq_lens_q is int64, expected int32"):
        net_of(wide, 1.0, 0).compile()
