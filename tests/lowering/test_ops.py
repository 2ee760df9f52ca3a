"""Each supported operation, lowered by itself, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.harness import check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).mul(3).to(dtype)


def ints(*shape: int, low: int = -5, high: int = 6, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


EXACT: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 1.5 - x,
    "mul": lambda x, y: x * y,
    "mul_scalar": lambda x, y: x * 0.1,
    "add_scalar": lambda x, y: x + 0.3,
    "div": lambda x, y: x / y,
    "div_scalar": lambda x, y: x / 3,
    "neg_abs": lambda x, y: (-x).abs(),
    "square": lambda x, y: x**2,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "clamp": lambda x, y: x.clamp(-0.7, 1.3),
    "clamp_min": lambda x, y: x.clamp(min=0.1),
    "clamp_max": lambda x, y: torch.clamp_max(x, 0.5),
    "relu": lambda x, y: torch.relu(x),
    "compare": lambda x, y: (x < y, x <= y, x > 0.1, x >= y, x == x, x != y),
    "logical": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0), torch.logical_not(x)),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where_scalar": lambda x, y: (torch.where(x > 0, x, -1.0), torch.where(x > 0, 2.0, y)),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.25),
    "isnan": lambda x, y: torch.isnan(torch.where(x > 0, x, torch.nan)),
    "casts": lambda x, y: (
        x.float(),
        x.to(torch.bfloat16),
        x.half(),
        x.double(),
        x.int(),
        x.bool(),
        (x > 0).to(x.dtype),
    ),
    "floor_ceil": lambda x, y: (x.floor(), x.ceil(), x.trunc(), (x * 2).round() / 2, x.sign()),
    "remainder": lambda x, y: (x % y, x % -1.5, torch.fmod(x, y), torch.fmod(x, 0.7)),
    "tril": lambda x, y: (torch.tril(x), torch.triu(x, 1)),
    "full": lambda x, y: (
        torch.full((2, 3), 1.5),
        torch.zeros(4),
        torch.ones_like(x),
        x.new_zeros(2, 2),
        torch.full_like(x, 2),
    ),
    "arange": lambda x, y: (torch.arange(7), torch.arange(2, 9), torch.arange(1, 8, 2), torch.arange(3.0)),
    "clone": lambda x, y: (x.clone(), x.detach() + 1, x.contiguous() * 1),
    "dropout": lambda x, y: F.dropout(x, 0.5, training=False) + 1,
    "promotion": lambda x, y: (x + (y > 0), x * 2, x.int() + 0.5, x.int() / 2, (x > 0) + (y > 0)),
    "constant": lambda x, y: x + torch.tensor(0.5, dtype=x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_pointwise_is_bitwise_eager(name: str, dtype: torch.dtype) -> None:
    check(EXACT[name], floats(4, 6, dtype=dtype), floats(4, 6, dtype=dtype))


CLOSE: dict[str, Callable] = {
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "sin_cos": lambda x: (torch.sin(x), torch.cos(x)),
    "more_trigonometry": lambda x: (x.tan(), x.sin().asin(), x.cos().acos(), x.atan(), torch.atan2(x, x[0] + 1)),
    "hyperbolic": lambda x: (x.tanh(), x.sinh(), x.cosh(), x.asinh(), (x.abs() + 1.1).acosh(), (x / 20).atanh()),
    "exponentials": lambda x: (x.exp2(), x.expm1(), x.abs().log1p(), (x.abs() + 0.5).log2(), (x.abs() + 2).log10()),
    "log_sigmoid": lambda x: (F.logsigmoid(x), F.elu(x), F.mish(x), F.leaky_relu(x), F.hardswish(x), F.celu(x)),
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")),
    "softplus": lambda x: F.softplus(x),
    "pow": lambda x: ((x.abs() + 1) ** 1.7, x**3, (x.abs() + 1) ** -0.5, (x.abs() + 1) ** -1, x.abs() ** 0.5),
    "reciprocal": lambda x: 2 / (x.abs() + 1),
    "softmax": lambda x: (x.softmax(-1), x.softmax(0), F.softmax(x, -1, dtype=torch.float32)),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: (F.layer_norm(x, (6,)), F.layer_norm(x, (4, 6), x * 2, x)),
    "rms_norm": lambda x: (F.rms_norm(x, (6,)), F.rms_norm(x, (6,), x[0], 1e-5)),
    "norm": lambda x: (x.norm(dim=-1), torch.linalg.vector_norm(x, 3, 0), F.normalize(x), F.group_norm(x[None], 2)),
    "var": lambda x: (x.var(-1, unbiased=False), x.var(), x.var(0, keepdim=True)),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLOSE)
def test_transcendental_is_close(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2.5 * torch.finfo(dtype).eps
    check(CLOSE[name], floats(4, 6, dtype=dtype), exact=False, tolerance=tolerance)


VIEWS: dict[str, Callable] = {
    "view": lambda x: x.view(4, 6) + 1,
    "reshape_copy": lambda x: x.transpose(0, 2).reshape(6, -1),
    "flatten": lambda x: (x * 2).flatten(1),
    "unflatten": lambda x: (x * 2).unflatten(2, (2, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute_reshape": lambda x: (x * 2).permute(2, 0, 1).reshape(8, 3),
    "t": lambda x: x[0].t() * 2,
    "numpy_T": lambda x: x[1].T,
    "mT": lambda x: x.mT + 1,
    "movedim": lambda x: x.movedim(0, -1) + 1,
    "squeeze": lambda x: x[:1].squeeze(0)[:, None].squeeze(),
    "expand": lambda x: x[:, :1].expand(2, 3, 4) * x,
    "expand_out": lambda x: x[:, :1].expand(-1, 3, -1),
    "slices": lambda x: (x[..., :2], x[:, 1:], x[:, -2:, 1::2] + 1),
    "select": lambda x: x.select(1, -1) + x[:, 0],
    "split": lambda x: [p + 1 for p in x.split([1, 2], 1)],
    "chunk": lambda x: torch.cat([x.chunk(2, -1)[1], -x.chunk(2, -1)[0]], -1),
    "unbind": lambda x: x.unbind(0)[1] * 3,
    "narrow": lambda x: x.narrow(2, 1, 2) + 0,
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: (x.roll(1, 1), x.roll(-1)),
    "repeat": lambda x: (x.repeat(2, 1, 1), x.repeat(2, 1, 1, 3)),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "stack": lambda x: (torch.stack([x, x + 1]), torch.stack([x, x + 1], -1)),
    "cat": lambda x: (torch.cat([x, x * 2, x], 1), torch.cat([x, x[:1]])),
    "pad": lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=7.0), F.pad(x, (-1, 0))),
    "rotate_half": lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1),
    "repeat_kv": lambda x: x[:, :, None].expand(2, 3, 2, 4).reshape(2, 6, 4) + 1,
    "outer": lambda x: x[0, :, :1] @ x[0, :1, :],
    "aliases_of_one": lambda x: (lambda y: (y, y.t()))(x[0] * 2),
    "reshape_of_cat": lambda x: torch.cat([x, x], -1).reshape(3, 16).t().reshape(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_exact(name: str) -> None:
    check(VIEWS[name], floats(2, 3, 4))


def test_views_of_strided_inputs() -> None:
    check(lambda x, y: (x.t() + y, x.reshape(-1), x.contiguous().view(-1)), floats(6, 4)[:, ::2].t(), floats(6, 2))


REDUCTIONS: dict[str, Callable] = {
    "sum": lambda x: (x.sum(-1), x.sum(0, keepdim=True), x.sum((0, 2)), x.sum(), x.sum((1, 2), keepdim=True)),
    "mean": lambda x: (x.mean(-1, keepdim=True), x.mean((0, 1)), x.mean(), x.mean(1, dtype=torch.float32)),
    "cumsum": lambda x: (x.cumsum(-1), (x * 2).cumsum(0), (x > 0).cumsum(1), x.cumsum(1, dtype=torch.float32)),
    "amax": lambda x: (x.amax(-1), x.amin((0, 2)), x.max(), x.min()),
    "max_dim": lambda x: (*x.max(-1), *x.min(1, keepdim=True), x.max(0)[0], x.max(0)[1]),
    "argmax": lambda x: (x.argmax(-1), x.argmax(), x.argmin(1, keepdim=True)),
    "any_all": lambda x: ((x > 0).any(-1), (x > 0).all(), x.bool().all(0, keepdim=True), (x > 9).any()),
    "prod": lambda x: (x.prod(-1), x.prod()),
    "one_element": lambda x: (x[:, :1].sum(1), x[:1].mean(0, keepdim=True)),
    "fused": lambda x: (x * 2 + 1).t().square().sum(0) if x.dim() == 2 else (x * 2).transpose(0, 1).pow(2).mean(-1),
    "linear": lambda x: (F.linear(x, x[0]), F.linear(x[0, 0], x[1], x[0, :, 0])),
    "attention": lambda x: (
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, x, x, attn_mask=x[..., :3] > 0, scale=0.3),
        F.scaled_dot_product_attention(x[None], x[None, :1], x[None, :1], attn_mask=x[0, :, :3], enable_gqa=True),
    ),
    "matmul": lambda x: (
        x @ x.mT,
        x @ x[0, 0],
        x[0, :, 0] @ x[1],
        x[0, 0] @ x[1, 1],
        x[0] @ x[1].t(),
        torch.bmm(x, x.mT),
    ),
    "addmm": lambda x: torch.addmm(x[0, :, 0], x[0], x[1].t()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    check(REDUCTIONS[name], floats(2, 3, 4, dtype=dtype), exact=False, tolerance=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "taps", "how"), [(4, 4, {}), (1, 3, {"padding": 2}), (9, 16, {"padding": 8}),
                                                      (8, 3, {"dilation": 2, "padding": 1}), (3, 1, {})])  # fmt: skip
def test_convolutions_of_each_channel(length: int, taps: int, how: dict[str, int], dtype: torch.dtype) -> None:
    def fn(x, weight, bias):
        return F.conv1d(x, weight, bias, groups=5, **how), F.conv1d(x, weight, groups=5, **how)

    inputs = floats(2, 5, length, dtype=dtype), floats(5, 1, taps, dtype=dtype), floats(5, dtype=dtype)
    check(fn, *inputs, exact=False, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_integers_are_exact(dtype: torch.dtype) -> None:
    def fn(x, y):
        return (
            x + y,
            x - y,
            x * y,
            x // 3,
            x % 3,
            x & y,
            x | y,
            x ^ y,
            ~x,
            x.sum(-1),
            x.clamp(1, 2),
            torch.maximum(x, y),
            x < y,
            x / 2,
            x.float(),
            x**2,
            torch.any(x, 0),
        )

    low = 0 if dtype == torch.uint8 else -5
    check(fn, ints(3, 4, low=low, dtype=dtype), ints(3, 4, low=low, dtype=dtype))


def test_gathers() -> None:
    x, rows, cols = floats(5, 7), ints(3, low=0, high=5), ints(2, 1, low=-7, high=7)
    check(
        lambda x, r, c: (
            F.embedding(r, x),
            F.embedding(c.abs() % 5, x),
            x.index_select(1, r),
            x[r],
            x[:, c],
            x[r, c],
            x[None, r, :, None],
            x.gather(0, r[None].expand(4, 3)),
            x[torch.arange(2)[:, None], torch.arange(3)],
        ),
        x,
        rows,
        cols,
    )


def test_gather_between_slices_and_with_separated_indices() -> None:
    check(lambda x, i: (x[:, i], x[i, :, i], x[..., i]), floats(4, 4, 4), ints(3, low=-4, high=4))
