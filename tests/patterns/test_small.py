"""Normalisation, rotary embedding, linear, gated activations and embedding: what is lifted, and what must not be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import torch_mpk.ops  # noqa: F401
from tests.patterns.rewriting import operands_of, rewritten, tasks_of

DTYPES = [torch.bfloat16, torch.float32]


def llama(x, w, eps=1e-5):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype),)


def llama_swapped(x, w):
    wide = x.to(torch.float32)
    return ((torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * wide).type_as(x) * w,)


def gemma(x, w):
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return ((y * (1.0 + w.float())).type_as(x),)


def once_rounded(x, w):
    """As gpt-oss's."""
    wide = x.float()
    return ((w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype),)


def unweighted(x, w):
    wide = x.float()
    return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) + w,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "attrs"),
    [
        (llama, {"eps": 1e-5, "style": "llama"}),
        (llama_swapped, {"eps": 1e-5, "style": "llama"}),
        (gemma, {"eps": 1e-6, "style": "gemma"}),
        (unweighted, {"eps": 1e-5, "style": "llama"}),
        (lambda x, w: (F.rms_norm(x, (48,), w, 1e-4),), {"eps": 1e-4, "style": "torch"}),
        (lambda x, w: (F.rms_norm(x, (48,)) * w,), {"eps": torch.finfo(torch.float32).eps, "style": "torch"}),
    ],
)
def test_rms_norm(function, attrs, dtype):
    gm = rewritten(function, torch.randn(2, 3, 48).to(dtype), torch.randn(48).to(dtype))
    (call,) = operands_of(gm, "rms_norm")
    assert {name: call[name] for name in attrs} == attrs
    assert ("weight" in call) == (
        "unweighted" not in function.__name__ and attrs["eps"] != torch.finfo(torch.float32).eps
    )
    others = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not torch.ops.aten.reshape.default]
    assert len(others) == (1 if "weight" in call else 2)


def no_eps(x, w):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype),)


def other_dim(x, w):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-5)).to(x.dtype),)


def cube(x, w):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),)


def other_tensor(x, w):
    wide = x.float()
    return (w * (wide * torch.rsqrt((wide + 1).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),)


def scaled_eps(x, w):
    wide = x.float()
    variance = torch.add(wide.pow(2).mean(-1, keepdim=True), 1e-5, alpha=2)
    return (w * (wide * torch.rsqrt(variance)).to(x.dtype),)


def narrow_variance(x, w):
    return (w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),)


def input_overwritten_between(x, w):
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    x.zero_()
    return (w * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype),)


def gemma_plus_two(x, w):
    wide = x.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (2.0 + w.float())).type_as(x),)


def double(x, w):
    return (F.rms_norm(x.double(), (48,), w.double(), 1e-5),)


@pytest.mark.parametrize(
    "function",
    [
        no_eps,
        other_dim,
        cube,
        other_tensor,
        scaled_eps,
        narrow_variance,
        input_overwritten_between,
        gemma_plus_two,
        double,
    ],
)
def test_what_is_no_rms_norm(function):
    gm = rewritten(function, torch.randn(2, 3, 48).bfloat16(), torch.randn(48).bfloat16())
    assert tasks_of(gm) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [50, 2880])
def test_a_norm_that_is_rounded_once(width, dtype):
    args = 3 * torch.randn(7, width).to(dtype), torch.randn(width).to(dtype)
    (call,) = operands_of(rewritten(once_rounded, *args), "rms_norm")
    assert "weight" in call and call["style"] == ("llama" if dtype == torch.float32 else "torch")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64,) * 2])
def test_a_norm_that_is_rounded_once_needs_16_bits(dtypes):
    args = (torch.randn(shape).to(dtype) for shape, dtype in zip(((7, 48), (48,)), dtypes, strict=True))
    assert tasks_of(rewritten(once_rounded, *args)) == {}


def test_rms_norm_needs_a_weight_of_its_dtype_and_size():
    x = torch.randn(2, 3, 48).bfloat16()
    assert "weight" not in operands_of(rewritten(llama, x, torch.randn(48)), "rms_norm")[0]
    assert "weight" not in operands_of(rewritten(llama, x, torch.randn(1).bfloat16()), "rms_norm")[0]


def test_an_interior_value_used_elsewhere_is_kept():
    def function(x, w):
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True) + 1e-5
        return w * (wide * torch.rsqrt(variance)).to(x.dtype), variance

    gm = rewritten(function, torch.randn(2, 48).bfloat16(), torch.randn(48).bfloat16())
    assert tasks_of(gm) == {"rms_norm": 1}


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(x, cos, sin):
    return (x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1),)


def rope_swapped(x, cos, sin):
    return (sin.unsqueeze(1) * rotate_half(x) + cos.unsqueeze(1) * x,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function", [rope, rope_swapped])
def test_rope(function, rows, dtype):
    def projected(x, cos, sin):
        return function(x.view(3, 1, 4, 16).transpose(1, 2), cos, sin)

    gm = rewritten(projected, *(torch.randn(*s).to(dtype) for s in ((3, 1, 64), (rows, 1, 16), (rows, 1, 16))))
    assert tasks_of(gm) == {"rope": 1}


def halves(x, cos, sin, split=lambda x: x.chunk(2, -1)):
    (a, b), c, s = split(x), cos.unsqueeze(1), sin.unsqueeze(1)
    return (torch.cat((a * c - b * s, s * a + c * b), -1),)


def halves_of_other_signs(x, cos, sin):
    (a, b), c, s = x.chunk(2, -1), cos.unsqueeze(1), sin.unsqueeze(1)
    return (torch.cat((a * c + b * s, b * c - a * s), -1),)


def halves_of_other_tables(x, cos, sin):
    (a, b), c, s = x.chunk(2, -1), cos.unsqueeze(1), sin.unsqueeze(1)
    return (torch.cat((a * c - b * s, b * s + a * c), -1),)


def halves_of_one_table(x, cos, sin):
    return torch.cat((*halves(x, cos, sin), *halves(x.flip(1), cos, sin)), 1), cos


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize(
    ("function", "num_tasks"),
    [
        (lambda *args: halves(*args), 1),
        (lambda *args: halves(*args, split=lambda x: (x[..., :8], x[..., 8:])), 1),
        (lambda *args: halves(*args, split=lambda x: x.split(8, -1)), 1),
        (lambda *args: halves_of_one_table(*args), 2),
        (halves_of_other_signs, 0),
        (halves_of_other_tables, 0),
        (lambda *args: halves(*args, split=lambda x: x.chunk(2, -1)[::-1]), 0),
        (lambda x, c, s: (torch.cat(halves(x, c, s)[0].chunk(2, -1), 1),), 1),
    ],
)
def test_rope_of_halves(function, num_tasks, positions, rows, dtype):
    tables = (torch.randn(rows, positions, 8).to(dtype) for _ in range(2))
    gm = rewritten(function, torch.randn(3, 4, positions, 16).to(dtype), *tables)
    assert tasks_of(gm) == ({"rope": num_tasks} if num_tasks else {})
    made = [node for node in gm.graph.nodes if node.target is torch.ops.aten.cat.default and "val" in node.meta]
    assert (
        num_tasks == 0
        or sum(node.meta["val"].shape[-1] == 16 and node.args[0][0] is node.args[0][1] for node in made) == 2
    )


def partial(x, cos, sin):
    part, rest = x[..., :8], x[..., 8:]
    return (torch.cat((rope(part, cos[..., :8], sin[..., :8])[0], rest), -1),)


def wrong_sign(x, cos, sin):
    turned = torch.cat((x[..., 8:], -x[..., :8]), -1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1),)


def wrong_halves(x, cos, sin):
    turned = torch.cat((-x[..., :8], x[..., 8:]), -1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1),)


def minus(x, cos, sin):
    return (x * cos.unsqueeze(1) - rotate_half(x) * sin.unsqueeze(1),)


def two_tensors(x, cos, sin):
    return (x.exp() * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1),)


@pytest.mark.parametrize("function", [wrong_sign, wrong_halves, minus, two_tensors])
def test_what_is_no_rope(function):
    gm = rewritten(function, torch.randn(3, 4, 1, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    assert tasks_of(gm) == {}


def test_rope_takes_what_rotates_of_whole_heads():
    per_head = torch.randn(3, 4, 1, 16)
    assert tasks_of(rewritten(lambda x, c, s: (x * c + rotate_half(x) * s,), per_head, per_head, per_head)) == {}
    gm = rewritten(partial, torch.randn(3, 4, 1, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    assert [call["x"].meta["val"].shape for call in operands_of(gm, "rope")] == [(3, 4, 8)]  # the part that rotates


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "num_tasks"),
    [
        (lambda x, w, b: (F.linear(x, w),), 1),
        (lambda x, w, b: (F.linear(x, w, b),), 1),
        (lambda x, w, b: (F.linear(x[0, 0], w, b),), 1),
        (lambda x, w, b: (x @ w.t(),), 1),
        (lambda x, w, b: (x @ w.T,), 1),
        (lambda x, w, b: (torch.mm(x[0], w.transpose(0, 1)),), 1),
        (lambda x, w, b: (torch.addmm(b, x[0], w.t()),), 1),
        (lambda x, w, b: (torch.addmm(b, x[0], w.t(), alpha=2),), 0),
        (lambda x, w, b: (torch.addmm(x[0, :, :24], x[0], w.t()),), 0),
        (lambda x, w, b: (x @ w[:24, :24].expand(2, 24, 24).mT.repeat(1, 2, 1),), 0),
    ],
)
def test_linear(function, num_tasks, dtype):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 3, 48), (24, 48), (24,)))
    assert tasks_of(rewritten(function, x, weight, bias))["linear"] == num_tasks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(3,), (2, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_that_is_not_transposed_is_that_of_one_expert(has_bias, rows, dtype):
    """As that of GPT-2's Conv1D."""

    def function(x, w, b):
        if not has_bias:
            return (x @ w,)
        return (torch.addmm(b, x.view(-1, x.size(-1)), w).view(*rows, -1),)

    args = (torch.randn(*shape).to(dtype) for shape in ((*rows, 48), (48, 24), (24,)))
    gm = rewritten(function, *args, tolerance=2 * torch.finfo(dtype).eps)
    (call,) = operands_of(gm, "expert_linear")
    assert call["transposed"].args[0].op == "placeholder", "it is not copied"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w.exp(),),
        lambda x, w: (x @ w[:, ::2],),
        lambda x, w: (x.repeat(22, 1) @ w,),  # 66 rows
        lambda x, w: (x @ w[:, :0],),
    ],
)
def test_other_products_with_a_weight_are_left_alone(function):
    args = torch.randn(3, 48), torch.randn(48, 24)
    assert tasks_of(rewritten(function, *args)) == {}


def test_products_of_float64_with_a_weight_are_left_alone():
    args = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 48), (48, 24)))
    assert tasks_of(rewritten(lambda x, w: (x @ w,), *args)) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "tasks"),
    [
        (lambda a, b: (F.silu(a) * b,), {"silu_mul": 1}),
        (lambda a, b: (b * F.silu(a),), {"silu_mul": 1}),
        (lambda a, b: (F.gelu(a) * b,), {"gelu_mul": 1}),
        (lambda a, b: (F.gelu(a, approximate="tanh") * b,), {"gelu_mul": 1}),
        (lambda a, b: (F.silu(a) * b[:1],), {}),
        (lambda a, b: (F.silu(a) * 2,), {}),
        (lambda a, b: (F.silu(a) + b,), {}),
        (lambda a, b: (F.silu(a) * b.double(),), {}),
    ],
)
def test_gated(function, tasks, dtype):
    assert tasks_of(rewritten(function, torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype))) == tasks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
@pytest.mark.parametrize(
    "halves",
    [
        lambda y: y.chunk(2, -1),
        lambda y: y.chunk(2, -1)[::-1],
        lambda y: (y[..., :24], y[..., 24:]),
        lambda y: y.split([24, 24], -1),
    ],
)
def test_a_linear_of_gate_and_up_is_two(halves, rows, dtype):
    def function(x, w, b):
        gate, up = halves(F.linear(x, w, b))
        return (F.silu(gate) * up,)

    args = [torch.randn(*shape).to(dtype) for shape in ((*rows, 40), (48, 40), (48,))]
    assert tasks_of(rewritten(function, *args, tolerance=1e-2)) == {"linear": 2, "silu_mul": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (F.silu(y[..., :24]) * y[..., 24:], y + 1),  # it is needed as a whole
        lambda y: (F.silu(y[..., :24]) * y[..., :24],),
        lambda y: (F.silu(y[..., :16]) * y[..., 16:32],),
        lambda y: (F.silu(y[:, ::2]) * y[:, 1::2],),
        lambda y: (F.silu(y[:2]) * y[2:],),
        lambda y: (F.silu(y[:, :24]).t() * y[:, 24:].t(),),
        lambda y: (F.silu(y[:, :24].clone()) * y[:, 24:].add_(1),),
    ],
)
def test_a_linear_that_is_more_than_gate_and_up_is_one(function):
    gm = rewritten(lambda x, w: function(F.linear(x, w)), torch.randn(4, 40), torch.randn(48, 40))
    assert tasks_of(gm)["linear"] == 1


def test_a_gate_overwritten_before_the_product_is_not_read_after_it():
    def function(gate, up):
        activated = F.silu(gate)
        gate.zero_()
        return (activated * up,)

    assert tasks_of(rewritten(function, torch.randn(3, 40), torch.randn(3, 40))) == {}


def test_embedding():
    assert tasks_of(rewritten(lambda i, w: (F.embedding(i, w),), torch.tensor([[3], [1]]), torch.randn(7, 8)))[
        "embedding"
    ]
    ids = torch.tensor([[3], [1]], dtype=torch.int32)
    assert tasks_of(rewritten(lambda i, w: (F.embedding(i, w),), ids, torch.randn(7, 8))) == {}


def test_a_product_over_one_element_is_a_multiplication():
    gm = rewritten(lambda a, b: (a @ b, a[0] @ b[0], a @ a.mT), torch.randn(2, 8, 1), torch.randn(2, 1, 3))
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(torch.ops.aten.mul.Tensor) == 3
    assert torch.ops.aten.matmul.default not in targets


def test_operators_of_tasks_become_their_tasks():
    def function(x, w, cache, slot):
        torch.ops.mpk.kv_write(cache, x[:, None].contiguous(), slot)
        return torch.ops.mpk.rms_norm(x, style="torch", eps=1e-6, weight=w), torch.ops.mpk.linear(x, cache[:, 0, 0])

    x, w, cache, slot = torch.randn(8, 8), torch.randn(8), torch.randn(8, 1, 4, 8), torch.tensor([2])
    gm = rewritten(function, x, w, cache, slot)
    assert tasks_of(gm) == {"kv_write": 1, "rms_norm": 1, "linear": 1}


def test_what_changes_nothing_is_dropped():
    def function(x):
        y = F.dropout(x.to(torch.float32).contiguous().expand(2, 6).view(2, 6)[:], 0.0).detach()
        return (y.type_as(x) + 1, F.dropout(x, 0.5, training=False) * 2)

    gm = rewritten(function, torch.randn(2, 6))
    assert sum(node.op == "call_function" for node in gm.graph.nodes) == 2


def test_lifts_are_reported_in_program_order():
    def function(x, w, n):
        return (F.linear(llama(x, n)[0], w),)

    gm = rewritten(function, torch.randn(2, 48), torch.randn(24, 48), torch.randn(48))
    assert [lift.pattern for lift in gm.meta["lifts"]] == ["llama_rms_norm", "linear"]


def test_a_view_of_a_lifted_result_still_shares_its_memory():
    def function(x, w):
        y = F.linear(x, w)
        y[0].add_(1)
        return (F.silu(y) * y,)

    assert tasks_of(rewritten(function, torch.randn(2, 48), torch.randn(24, 48))) == {"linear": 1, "silu_mul": 1}


def test_a_view_may_come_again_when_its_like_is_folded_away():
    def function(x):
        y = x + 1
        return (y.view(2, 3).view(3, 2) * 2, y.view(2, 3) * 2)

    gm = rewritten(function, torch.randn(6))
    assert Counter(node.target for node in gm.graph.nodes)[torch.ops.aten.reshape.default] == 2


def test_what_is_expanded_is_not_viewed_where_pytorch_would_not() -> None:
    def function(x, w):
        y = (x * 2).unsqueeze(1).expand(1, 2, 1, 7, 48).reshape(-1, 1, 7, 48)
        return (F.linear(y, w),)

    assert tasks_of(rewritten(function, torch.randn(1, 1, 7, 48), torch.randn(24, 48))) == {"linear": 1}


def test_pytorch_may_lay_out_what_is_reshaped_in_another_way_than_captured() -> None:
    """``pad`` takes a folded view's strides, which differ where its sizes are 1, for those of channels-last."""

    def function(mask, w):
        x = F.pad(mask[None].expand(2, 3, 1, 1, 7).float(), (0, 9))
        return (F.linear(x.reshape(6, 16), w),)

    mask = torch.rand(7, 1, 1, 3).gt(0.5).transpose(0, 3)
    assert tasks_of(rewritten(function, mask, torch.randn(4, 16))) == {"linear": 1}


def test_views_through_which_memory_is_written_are_not_made_reshapes() -> None:
    def function(x):
        y = x * 2
        y.view(2, 3).view(3, 2).add_(1)
        return (y,)

    targets = Counter(node.target for node in rewritten(function, torch.randn(6)).graph.nodes)
    assert (targets[torch.ops.aten.view.default], targets[torch.ops.aten.reshape.default]) == (2, 0)
