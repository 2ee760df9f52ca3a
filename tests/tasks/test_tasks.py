"""The reference of each of torch_mpk's tasks against an independent formula in fp32, and declarations."""

from __future__ import annotations

import itertools
import math
import pkgutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_mpk.ops
import torch_mpk.tasks
from torch_mpk import registry

OWN = [task for task in registry.tasks() if task.is_ours]
CASES = [pytest.param(t, s, id=f"{t.name}-{i}") for t in OWN for i, s in enumerate(t.samples)]
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def linear(x, weight, bias):
    y = torch.einsum("rk,nk->rn", x, weight)
    return y if bias is None else y + bias


def rms_norm(x, weight, eps, style):
    y = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
    if weight is None:
        return y
    return y * (1 + weight) if style == "gemma" else y * weight


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    (cos_a, cos_b), (sin_a, sin_b) = cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1)
    return torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1)


def kv_write(cache, new, slot):
    cache[:, :, slot.item()] = new


def capped(scores, softcap):
    return softcap * (2 / (1 + (-2 * scores / softcap).exp()) - 1) if softcap else scores


def weights_beside(scores, sinks):
    """Of [heads, keys]."""
    e = scores.exp()
    return e / (e.sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None].to(e.dtype).exp()))


def attention(q, k_new, v_new, slot, k_cache, v_cache, mask, limit, sinks, scale, style, softcap):
    if k_new is not None:
        kv_write(k_cache, k_new, slot)
        kv_write(v_cache, v_new, slot)
    y = q.new_full((*q.shape[:2], v_cache.shape[3]), math.nan if style == "eager" and sinks is None else 0)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k_cache.shape[1] // q.shape[1]
            scores = capped(scale * k_cache[b, g] @ q[b, h], softcap)
            if mask is not None:
                row = mask[b, h]
                scores = scores.masked_fill(~row, -math.inf) if row.dtype == torch.bool else scores + row
            if limit is not None:
                scores = scores[: limit[b]]
            if (scores > -math.inf).any():
                [weights] = weights_beside(scores[None], None if sinks is None else sinks[h, None])
                y[b, h] = weights @ v_cache[b, g, : len(weights)]
    return y


def latent_attention(q, q_rope, latent, rope, mask, limit, scale):
    """Every head has the same keys, of which the first elements are its values."""
    keys = torch.cat((latent, rope), -1)
    own = torch.cat((q, q_rope), -1), None, None, None, keys, latent
    return attention(*own, mask, limit, None, scale, "sdpa", 0.0)


def prefill_attention(q, k, v, mask, limit, sinks, scale, style, softcap):
    y = q.new_empty((*q.shape[:3], v.shape[3]))
    for s in range(q.shape[1]):
        visible = None if mask is None else mask[:, :, s], None if limit is None else limit[:, s]
        y[:, s] = attention(q[:, s], None, None, None, k, v, *visible, sinks, scale, style, softcap)
    return y


def paged_decode(q, k_cache, v_cache, pages, first, limit, scale):
    y = torch.zeros_like(q)
    for n in range(q.shape[0]):
        own = pages[first[n] :].tolist()
        k, v = (torch.cat([cache[page] for page in own])[: limit[n]] for cache in (k_cache, v_cache))  # [L, G, D]
        weights = (scale * torch.einsum("grd,lgd->grl", q[n], k)).softmax(-1)
        y[n] = torch.einsum("grl,lgd->grd", weights, v)
    return y


def paged_attention(q, k_new, v_new, k_pages, v_pages, block_table, length, sinks, scale, softcap):
    y = q.new_zeros((*q.shape[:2], v_pages.shape[3]))
    places = [
        [divmod(p, k_pages.shape[1]) for p in range(n) if p < table.shape[0] * k_pages.shape[1]]
        for n, table in zip(length.tolist(), block_table)
    ]
    places = [[(int(table[m]), s) for m, s in of] for of, table in zip(places, block_table)]
    is_there = [[0 <= page < len(k_pages) for page, _ in of] for of in places]
    for r, of in enumerate(places):
        if k_new is not None and of and is_there[r][-1]:
            k_pages[of[-1]], v_pages[of[-1]] = k_new[r], v_new[r]
    for r, of in enumerate(places):
        own = [place for place, there in zip(of, is_there[r]) if there]
        if own:
            k, v = (
                torch.stack([t[place] for place in own]).repeat_interleave(q.shape[1] // t.shape[2], 1)
                for t in (k_pages, v_pages)
            )
            scores = capped(scale * torch.einsum("hd,lhd->hl", q[r], k), softcap)
            y[r] = torch.einsum("hl,lhd->hd", weights_beside(scores, sinks), v)
    return y


def varlen_attention(
    q, k_new, v_new, k_cache, v_cache, read_index, cu_seq_lens_q, cu_seq_lens_k, sinks, scale, window, softcap
):
    y = q.new_zeros((*q.shape[:2], v_cache.shape[2]))
    ends_q, ends_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    for begin, end, first, last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        rows = read_index[first : first + max(0, last - first - (end - begin))]
        for t in range(begin, end):
            k, v = (
                torch.cat((cache[rows], new[begin : t + 1]))[-window:].repeat_interleave(q.shape[1] // new.shape[1], 1)
                for cache, new in ((k_cache, k_new), (v_cache, v_new))
            )
            scores = capped(scale * torch.einsum("hd,lhd->hl", q[t], k), softcap)
            y[t] = torch.einsum("hl,lhd->hd", weights_beside(scores, sinks), v)
    return y


def paged_kv_write(cache, new, slot):
    for n, at in enumerate(slot.tolist()):
        cache[at // cache.shape[1], at % cache.shape[1]] = new[n]


def embedding(ids, weight):
    return torch.nn.functional.one_hot(ids, weight.shape[0]).to(weight.dtype) @ weight


def silu_mul(gate, up):
    return gate / (1 + (-gate).exp()) * up


def gelu_mul(gate, up, approximate):
    if approximate == "tanh":
        inner = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up
    return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up


def argmax(x):
    return (x == x.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)


def nth_largest(x, n, peaks):
    rows = x.flatten(0, -2).tolist()
    return x.new_tensor([sorted(row, reverse=True)[i] for row, i in zip(rows, n.flatten().tolist())]).view(n.shape)


def all_reduce(x, ranks, group):
    return ranks * x  # of which there is one


def all_gather(x, ranks, group):
    return x.repeat(*[1] * (x.dim() - 1), ranks)


def topk(x, num):
    ids = [sorted(range(len(row)), key=lambda i: -row[i])[:num] for row in x.flatten(0, -2).tolist()]
    found = torch.tensor(ids).view(*x.shape[:-1], num)
    return x.gather(-1, found), found


def expert_linear(x, ids, weight, transposed):
    every = torch.einsum("rck,enk->rcen", x, transposed.mT if weight is None else weight)
    return torch.einsum("rcen,rce->rcn", every, torch.nn.functional.one_hot(ids, every.shape[2]).to(x.dtype))


def nibbles(words, order):
    """Of int32 [N, K]: [8 N, K], where each word's number i, from its low bits, is row ``order[i]``."""
    rows = [[[word % 2**32 >> 4 * order.index(r) & 15 for word in line] for r in range(8)] for line in words.tolist()]
    return torch.tensor(rows).flatten(0, 1)


def quantized_linear(x, weight, weight_scale, bias, x_scale, zero, column_groups, codebook, scale_code, scale_scale,
                     scale_offset, block_rows, block_columns, x_columns, scale_block):  # fmt: skip
    if scale_code is not None:
        places = torch.arange(weight_scale.numel()).view(weight_scale.shape)
        weight_scale = scale_code[weight_scale.long()] * scale_scale[places // scale_block] + scale_offset
    order = list(range(8))
    if weight.dtype == torch.int32 and weight.shape[1] == x.shape[1]:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        weight = nibbles(weight, order).to(torch.uint8)
        weight = weight[:, ::2] + 16 * weight[:, 1::2]
    (n, p), k, rows = weight.shape, x.shape[1], x.clone()
    codes = weight.view(torch.uint8).view(n, -1) if p < k else weight  # of 4 bits: the first of two is the low one
    if p < k:
        codes = torch.stack([codes % 16, codes // 16], -1).flatten(1).to(torch.int8)
        codes = (codes + 8) % 16 - 8 if weight.dtype == torch.int8 else codes
    for r, first in itertools.product(range(len(x)), range(0, k, x_columns if x_columns > 0 else k)):
        block = rows[r, first : first + (x_columns if x_columns > 0 else k)]  # written in place
        if x_columns or x_scale is not None:
            scale = block.abs().max() / 448 if x_scale is None else x_scale
            block.copy_((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    place = (
        torch.arange(n) // (block_rows or n),
        torch.arange(k) // (block_columns or k) if column_groups is None else column_groups,
    )
    points = nibbles(zero, order) if zero is not None and zero.dtype == torch.int32 else zero
    middle = 8 if p < k and weight.dtype != torch.int8 and (zero is None or zero.is_floating_point()) else 0
    numbers = codes.float() - middle
    if weight.dtype == torch.float4_e2m1fn_x2:
        exponents, halves = codes.float() % 8 // 2, codes.float() % 2 / 2
        magnitudes = torch.where(exponents > 0, (1 + halves) * 2 ** (exponents - 1), halves)
        numbers = magnitudes.where(codes < 8, -magnitudes)
    if codebook is not None:
        numbers = codebook[codes.unflatten(1, (-1, 2)).flip(2).flatten(1).long()]
    if zero is not None and not zero.is_floating_point():
        numbers = numbers - points[place[0][:, None], place[1]]
    matrix = numbers * weight_scale[place[0][:, None], place[1]].float()
    if zero is not None and zero.is_floating_point():
        matrix = matrix + zero[place[0][:, None], place[1]]
    y = rows @ matrix.T.to(rows.dtype)
    return y if bias is None else y + bias


def dequantise(weight, weight_scale, zero, *tables, columns, dtype, **blocks):
    return quantized_linear(
        torch.eye(columns), weight, weight_scale, None, None, zero, *tables, x_columns=0, **blocks
    ).T


def quantized_expert_linear(x, ids, weight, weight_scale, zero, **attrs):
    y = torch.zeros(*ids.shape, weight.shape[1])
    for e in range(len(weight)):
        operands = weight[e], weight_scale[e], None, None, None if zero is None else zero[e], *[None] * 5
        rows = ids.flatten() == e  # in one product, whose sums have an order
        y.flatten(0, 1)[rows] = quantized_linear(x.flatten(0, 1)[rows], *operands, **attrs, scale_block=0)
    return y


def quantise_rows(x, scale):
    scales = x.abs().amax(-1) / 448 if scale is None else scale.expand(x.shape[:-1])
    return (x / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scales


def e4m3_linear(x, x_scales, weight, weight_scale, bias, block_rows, block_columns, x_columns, dtype):
    place = torch.arange(len(weight)) // block_rows, torch.arange(x.shape[1]) // (block_columns or x.shape[1])
    matrix = weight * weight_scale[place[0][:, None], place[1]]
    y = x * x_scales[:, torch.arange(x.shape[1]) // (x_columns if x_columns > 0 else x.shape[1])] @ matrix.T
    return y if bias is None else y + bias


def place_in_words(columns):
    c = torch.arange(columns)
    return c // 32 * 32 + c % 4 * 8 + c % 32 // 4


def order_columns(x):
    ordered = torch.empty_like(x)
    ordered[..., place_in_words(x.shape[-1])] = x
    return ordered, x.sum(-1)


def ordered_linear(x, x_sums, weight, weight_scale, bias, zero, block_rows, block_columns):
    columns = x.shape[1]
    x = x[:, place_in_words(columns)]
    codes = torch.stack([weight.to(torch.int32) & 15, weight.to(torch.int32) >> 4 & 15], -1).flatten(1)
    block = torch.arange(columns) // (block_columns or columns)
    y = x @ ((codes ^ 8) - 8).float().mul(weight_scale[:, block]).T
    if zero is not None:
        y = y + x_sums @ zero[:, block[:: columns // x_sums.shape[1]]].T
    return y if bias is None else y + bias


def nucleus(x, rest, peaks, sums):
    found = []
    for row, part in zip(x.flatten(0, -2).double(), rest.flatten().tolist()):
        likely = sorted(zip(row.tolist(), range(len(row)), row.softmax(0).tolist()))
        gone = itertools.accumulate(probability for *_, probability in likely)
        found.append(next((one for one, sum_ in zip(likely, gone) if sum_ > part), likely[-1]))
    least, first, _ = zip(*found)
    return x.new_tensor(least).view(rest.shape), torch.tensor(first).view(rest.shape)


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


class EqualOnAnyDevice(TorchDispatchMode):
    """Refuses divisions by numbers that a GPU does by their rounded reciprocals."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar) and not isinstance(args[1], torch.Tensor):
            assert math.frexp(args[1])[0] == 0.5, f"{func} by {args[1]}, which is no power of two: divide by a tensor"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(("task", "sample"), CASES)
def test_reference_equals_formula(task, sample, dtype):
    operands, attrs = task.sample(sample, dtype)
    has_numbers = [t is not None and t.is_floating_point() and t.dtype != torch.float4_e2m1fn_x2 for t in operands]
    wide = [t.float() if t is not None and has else t for t, has in zip(operands, has_numbers, strict=True)]
    wide = [t if t is None else t.clone() for t in wide]
    with EqualOnAnyDevice():
        results = task.results(task(*operands, **attrs))
    expected = task.results(globals()[task.name](*wide, **attrs))
    for result, formula in zip(results, expected, strict=True):
        own = dtype
        # Results have other dtypes than x.
        if task.name in ("quantise_rows", "order_columns", "e4m3_linear", "dequantise"):
            own = result.dtype
        assert result.dtype == (own if formula.is_floating_point() else torch.int64)
        error = 2 * ULP.get(own, 0)
        torch.testing.assert_close(result.to(formula.dtype), formula, rtol=error, atol=error)
    for operand, t, w in zip(task.inputs, operands, wide, strict=True):
        if t is not None:  # written as the formula does, or untouched
            torch.testing.assert_close(t.to(w.dtype), w, rtol=0, atol=0, msg=operand.name)


@pytest.mark.parametrize("task", OWN, ids=repr)
def test_declaration(task):
    assert task.samples
    assert task.name in registry._C.task_names()
    assert bool(task.header) == (task.role in ("row", "stream", "tile"))


def test_every_file_declares_a_task_of_its_name():
    assert {m.name for m in pkgutil.iter_modules(torch_mpk.tasks.__path__)} <= {t.name for t in registry.tasks()}


@pytest.mark.parametrize("slot", [-1, 8, 1 << 40])
def test_a_slot_outside_the_cache_writes_nothing(slot):
    cache, new = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 4)
    before = cache.clone()
    torch.ops.mpk.kv_write(cache, new, torch.tensor([slot]))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("style", ["sdpa", "eager"])
def test_rows_without_a_live_key(style):
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 10, 16), torch.randn(3, 2, 10, 16)

    def is_empty(y):
        return y.isnan().all() if style == "eager" else not y.any()

    def attend(mask, limit):
        return torch.ops.mpk.attention(q, None, None, None, k, v, mask, limit, scale=0.25, style=style)

    bool_mask = torch.ones(3, 4, 10, dtype=torch.bool)
    bool_mask[1, 2] = False
    y = attend(bool_mask, None)
    assert is_empty(y[1, 2])
    assert not is_empty(y[1, 1])

    float_mask = torch.zeros(3, 4, 10)
    float_mask[0, 2] = -torch.inf
    float_mask[1] = torch.finfo(torch.float32).min
    y = attend(float_mask, torch.tensor([10, 10, 10]))
    assert is_empty(y[0, 2])
    torch.testing.assert_close(y[1], v[1].mean(1).repeat_interleave(2, 0))

    y = attend(None, torch.tensor([4, 0, 99]))
    assert is_empty(y[1])
    torch.testing.assert_close(y[2], attend(None, None)[2])
    torch.testing.assert_close(y[0], attend((torch.arange(10) < 4).expand(3, 4, 10), None)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: registry.get("rms_norm")(torch.ones(2, 4096), torch.ones(2048), eps=1e-6, style="llama"),
            "rms_norm: weight has H=2048, but H=4096 was bound by x (signature: x[R, H], weight[H]? -> y[R, H])",
        ),
        (
            lambda: torch.ops.mpk.linear(torch.ones(8), torch.ones(4, 8)),
            "linear: x has shape (8,), expected 2 dimensions: x[R, K]",
        ),
        (
            lambda: registry.get("silu_mul")(torch.ones(2, 3, 4), torch.ones(2, 4)),
            "silu_mul: up has ...=(2, 4), but ...=(2, 3, 4) was bound by gate",
        ),
        (
            lambda: registry.get("embedding")(torch.ones(1), torch.ones(4, 8)),
            "embedding: ids is torch.float32, expected torch.int64",
        ),
        (lambda: registry.get("linear")(torch.ones(1, 8), None), "linear: weight is required"),
        (
            lambda: registry.get("kv_write")(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 8), torch.tensor([1, 2])),
            "kv_write: slot has 1=2, but 1=1 was bound by the signature",
        ),
        (
            lambda: registry.get("attention")(
                torch.ones(1, 3, 8), None, None, None, torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), scale=1.0
            ),
            "attention: q has H=3, expected a multiple of k_cache's G=2",
        ),
        (
            lambda: registry.get("rms_norm")(torch.ones(1, 8), eps=1e-6, style="t5"),
            "rms_norm: style is 't5', expected one of llama, torch, gemma",
        ),
    ],
)
def test_bad_operands_are_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_bad_attributes_are_named():
    with pytest.raises(TypeError, match=r"rms_norm: attribute \['eps'\] is missing; it takes \['eps', 'style'\]"):
        registry.get("rms_norm")(torch.ones(1, 8), style="llama")
    with pytest.raises(TypeError, match=r"rope: unknown attribute \['theta'\]"):
        registry.get("rope")(torch.ones(1, 1, 8), torch.ones(1, 8), torch.ones(1, 8), theta=1.0)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("x[R] y[R]", "needs one '->'"),
        ("x[R], weight -> y[R]", "cannot read 'weight'"),
        ("a[R] -> y[R]", "must be the signature's operands"),
        ("x[R, ...] -> y[R]", "'...' can only stand first"),
    ],
)
def test_bad_declarations_are_refused(signature, message):
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(ValueError, match="broken: ") as error:
        registry.task(signature, role="pointwise")(broken)
    assert message in str(error.value)
    assert "broken" not in registry._C.task_names()


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="task 'linear' is already declared at .*tasks/linear.py:"):
        registry.task("x[R], bias[R]? -> y[R]", role="pointwise")(_named("linear"))


def test_a_new_task_becomes_an_operator():
    double = registry.task("x[...], bias[...]? -> y[...]", role="pointwise")(_named("double_for_test"))
    x = torch.randn(2, 3)
    assert torch.equal(torch.ops.mpk.double_for_test(x), 2 * x)
    assert registry.get("double_for_test") is double


def _named(name):
    def reference(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2

    reference.__name__ = name
    return reference
