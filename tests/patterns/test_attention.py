"""Attention over a static cache: the forms that are lifted, the limits they get, and what must stay as it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.patterns.rewriting import assert_same, clones, graph_of, operands_of, rewritten, tasks_of
from torch_mpk import patterns

B, H, G, L, D = 3, 4, 2, 24, 16
MIN = torch.finfo(torch.float32).min
aten = torch.ops.aten


def repeat_kv(x):
    return x[:, :, None].expand(B, G, H // G, L, D).reshape(B, H, L, D)


def sdpa(q, k, v, mask=None, **kwargs):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask, scale=0.3, **kwargs)


def eager(q, k, v, mask=None, dtype=torch.float32, softcap=None):
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1, dtype=dtype).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.0, training=False), repeat_kv(v))


def beside_sinks(q, k, v, mask=None, *, sinks, less_maximum=True, dtype=None):
    """As gpt-oss attends."""
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3
    if mask is not None:
        scores = scores + mask
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[2], -1)], dim=-1)
    if less_maximum:
        both = both - both.max(dim=-1, keepdim=True).values
    weights = F.softmax(both, dim=-1, dtype=dtype or both.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, 0.0, training=False).to(v.dtype), repeat_kv(v))


def step(q, k_new, v_new, k, v, counter, attend, mask=lambda counter: None, before=None, between=None, slot=None):
    """A decode step as models write it: returns the attention and leaves caches and counter advanced."""
    slot = torch.arange(1) + counter if slot is None else slot(counter)
    attn_mask = mask(counter)
    if attn_mask is not None and attn_mask.ndim == 1:
        attn_mask = attn_mask[None]
    counter.add_(1)
    if before is not None:
        before(k, v)
    k.index_copy_(2, slot, k_new)
    v.index_copy_(2, slot, v_new)
    extra = between(k, v, k_new) if between is not None else None
    y = attend(q, k, v, attn_mask)
    return (y.transpose(1, 2).reshape(B, 1, H * D), *([] if extra is None else [extra]))


def inputs(dtype=torch.float32, counter=7):
    q, k_new, v_new = (torch.randn(B, 1, heads, D).to(dtype).transpose(1, 2) for heads in (H, G, G))
    return [q, k_new, v_new, *(torch.randn(B, G, L, D).to(dtype) for _ in "kv"), torch.tensor(counter)]


EDGES = [inputs(counter=0), inputs(counter=L - 1)]


def causal(counter):
    return (torch.arange(L) + 0)[None, None, None, :] <= (torch.arange(1) + counter)[None, None, :, None]


def added(condition, fill=MIN, heads=1):
    return torch.where(condition.expand(B, heads, 1, L), torch.tensor(0.0), fill)


def the_attention(gm):
    (call,) = operands_of(gm, "attention")
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "attend",
    [
        sdpa,
        eager,
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        lambda q, k, v, mask: sdpa(q, k, v),
    ],
)
def test_the_cache_write_is_absorbed(attend, dtype):
    def mask(counter):
        return added(causal(counter)).to(dtype) if attend is eager else causal(counter)

    gm = rewritten(partial(step, attend=attend, mask=mask), *inputs(dtype))
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()
    assert not any(node.target is aten.index_copy_.default for node in gm.graph.nodes)


@pytest.mark.parametrize("masks", [lambda counter: None, lambda counter: added(causal(counter))])
def test_scores_with_a_cap(masks):
    gm = rewritten(partial(step, attend=partial(eager, softcap=1.5), mask=masks), *inputs())
    assert the_attention(gm)["softcap"] == 1.5
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()


def test_values_of_another_size_than_keys():
    """As of latent attention."""

    def function(q, k_new, v_new, k, v, slot):
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        return (F.scaled_dot_product_attention(q, k, v),)

    shapes = [*[(B, H, 1, D)] * 2, (B, H, 1, 8), (B, H, L, D), (B, H, L, 8)]
    gm = rewritten(function, *map(torch.randn, shapes), torch.tensor([3]))
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()


def test_heads_that_are_not_grouped():
    def function(q, k_new, v_new, k, v, slot):
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        return (F.scaled_dot_product_attention(q, k, v),)

    shapes = [(B, H, 1, D)] * 3 + [(B, H, L, D)] * 2
    gm = rewritten(function, *map(torch.randn, shapes), torch.tensor([3]))
    assert {"k_new", "scale"} <= the_attention(gm).keys()
    assert the_attention(gm)["scale"] == D**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: torch.softmax(q @ k.transpose(2, 3) * 0.3, -1, dtype=torch.float32).to(q.dtype) @ v,
    ],
)
def test_one_key_head_that_is_broadcast(attend, dtype):
    """As Falcon's. PyTorch has another kernel for it, with another order of sums."""

    def function(q, k_new, v_new, k, v, slot):
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        return (attend(q, k, v),)

    shapes = [(B, H, 1, D), *[(B, 1, 1, D)] * 2, *[(B, 1, L, D)] * 2]
    args = *(torch.randn(shape).to(dtype) for shape in shapes), torch.tensor([3])
    gm = rewritten(function, *args, tolerance=4 * torch.finfo(dtype).eps)
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()


def test_a_cache_that_is_only_read():
    call = the_attention(rewritten(lambda q, k, v: (sdpa(q, k, v),), *inputs()[:1], *inputs()[3:5]))
    assert call.keys() == {"q", "k_cache", "v_cache", "scale", "style", "softcap"}


BOOL_MASKS = {
    "le": (causal, False),
    "ge": (lambda c: (torch.arange(1) + c)[:, None] >= torch.arange(L), False),
    "lt": (lambda c: torch.arange(L) < (torch.arange(1) + c), False),
    "gt": (lambda c: ((torch.arange(1) + c) > torch.arange(0, L))[None, None, None, :], False),
    "of the counter itself": (lambda c: torch.arange(L) <= c, False),
    "and True": (lambda c: torch.ones((), dtype=torch.bool) & causal(c).expand(B, H, 1, L), False),
    "and more": (lambda c: causal(c) & (torch.arange(L) % 3 != 1).expand(B, 1, 1, L), True),
    "and a window": (lambda c: causal(c) & (torch.arange(L) > c - 4), True),
    "none live in a row": (lambda c: causal(c) & (torch.arange(B) > 0)[:, None, None, None], True),
    "per row": (lambda c: torch.arange(L) <= (c + torch.arange(B))[:, None, None, None], False),
}


@pytest.mark.parametrize("name", BOOL_MASKS)
def test_a_comparison_with_the_position_becomes_the_limit(name):
    mask, is_mask_kept = BOOL_MASKS[name]
    gm = rewritten(partial(step, attend=sdpa, mask=mask), *inputs(), also=EDGES)
    call = the_attention(gm)
    assert ("mask" in call) == is_mask_kept
    assert "limit" in call
    assert aten.amax.default not in [node.target for node in gm.graph.nodes]


VALUE_MASKS = {
    "or": lambda c: causal(c) | (torch.arange(L) == 20),
    "not": lambda c: ~causal(c),
    "or inside": lambda c: (causal(c) | (torch.arange(L) == 20)) & (torch.arange(L) != 2),
    "beyond": lambda c: torch.arange(L) >= (torch.arange(1) + c),
    "another arange": lambda c: torch.arange(1, L + 1) <= (torch.arange(1) + c),
    "scaled arange": lambda c: 2 * torch.arange(L) <= (torch.arange(1) + c),
    "another dimension": lambda c: (torch.arange(B)[:, None, None, None] <= c).expand(B, 1, 1, L),
    "per head": lambda c: torch.arange(L) <= (c + torch.arange(H))[None, :, None, None],
    "nothing": lambda c: torch.zeros(B, H, 1, L, dtype=torch.bool),
    "transposed": lambda c: torch.ones(L, L, dtype=torch.bool).triu().t()[7:8],
}


@pytest.mark.parametrize("name", VALUE_MASKS)
def test_any_other_mask_is_read_for_its_limit(name):
    gm = rewritten(partial(step, attend=sdpa, mask=VALUE_MASKS[name]), *inputs())
    assert {"mask", "limit"} <= the_attention(gm).keys()


FLOAT_MASKS = {
    "causal": (lambda c: added(causal(c)), False),
    "causal of -inf": (lambda c: added(causal(c), -torch.inf), False),
    "causal, not the minimum": (lambda c: added(causal(c), -1e9), True),
    "causal, bound not checked": (lambda c: added(torch.arange(L) <= (torch.arange(1) + c - 1)), True),
    "and more": (lambda c: added(causal(c) & (torch.arange(L) % 3 != 1)), True),
    "none live in a row": (lambda c: added(causal(c) & (torch.arange(B) > 0)[:, None, None, None]), True),
    "none live in a head": (lambda c: added(causal(c) & (torch.arange(H) > 0)[:, None, None], heads=H), True),
    "-inf in a row": (lambda c: added((torch.arange(B) > 0)[:, None, None, None], -torch.inf).expand(B, 1, 1, L), True),
    "-inf in a head": (
        lambda c: added(causal(c) & (torch.arange(H) > 0)[:, None, None], -torch.inf, heads=H),
        True,
    ),
    "bias": (lambda c: torch.linspace(-1, 1, L).expand(1, 1, 1, L), True),
}


@pytest.mark.parametrize("attend", [sdpa, eager])
@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_added_masks(name, attend):
    mask, is_mask_kept = FLOAT_MASKS[name]
    gm = rewritten(partial(step, attend=attend, mask=mask), *inputs(), also=EDGES)
    assert ("mask" in the_attention(gm)) == is_mask_kept


def a_step_beside_sinks(q, k_new, v_new, k, v, counter, sinks, mask=lambda counter: None, **form):
    return step(q, k_new, v_new, k, v, counter, partial(beside_sinks, sinks=sinks, **form), mask)


@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_scores_beside_sinks(name):
    mask, is_mask_kept = FLOAT_MASKS[name]
    sinks = 2 * torch.randn(H)
    also = [(*edge, sinks) for edge in EDGES]
    gm = rewritten(partial(a_step_beside_sinks, mask=mask), *inputs(), sinks, also=also)
    assert {"k_new", "v_new", "slot", "sinks"} <= the_attention(gm).keys()
    assert ("mask" in the_attention(gm)) == is_mask_kept


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2])
def test_sinks_of_any_dtype(dtypes):
    dtype, sinks_dtype = dtypes
    gm = rewritten(a_step_beside_sinks, *inputs(dtype), 2 * torch.randn(H).to(sinks_dtype))
    assert {"k_new", "v_new", "slot", "sinks"} <= the_attention(gm).keys()


def divided(q, k, v, mask=None):
    """As GPT-J attends."""
    scores = torch.matmul(q.to(torch.float32), repeat_kv(k).to(torch.float32).transpose(-1, -2)) / D**0.5
    if mask is not None:
        scores = scores + mask
    return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), repeat_kv(v))


@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_divided_scores(name):
    mask, is_mask_kept = FLOAT_MASKS[name]
    gm = rewritten(partial(step, attend=divided, mask=mask), *inputs(), also=EDGES, tolerance=1e-6)
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()
    assert ("mask" in the_attention(gm)) == is_mask_kept
    assert the_attention(gm)["scale"] == D**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_divided_in_float32(dtype):
    """The task's reference rounds scores; kernels do not."""

    def mask(counter):
        return torch.where(causal(counter), torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    tolerance = 4 * torch.finfo(dtype).eps
    gm = rewritten(partial(step, attend=divided, mask=mask), *inputs(dtype), tolerance=tolerance)
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()


@pytest.mark.parametrize("form", [{"less_maximum": False}, {"dtype": torch.float32}], ids=str)
def test_other_forms_with_sinks(form):
    """The task's reference rounds elsewhere."""
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    args = *inputs(torch.bfloat16), torch.randn(H).bfloat16()
    gm = rewritten(partial(a_step_beside_sinks, **form), *args, tolerance=tolerance)
    assert {"k_new", "v_new", "slot", "sinks"} <= the_attention(gm).keys()


def test_wider_softmax_with_sinks_is_left_alone():
    args = *inputs(torch.bfloat16), torch.randn(H).bfloat16()
    assert "attention" not in tasks_of(rewritten(partial(a_step_beside_sinks, dtype=torch.float64), *args))


def less_maximum(q, k, v, mask=None):
    """As MiMo attends where it has no sinks."""
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3
    if mask is not None:
        scores = scores + mask
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(scores, dim=-1, dtype=scores.dtype).to(v.dtype), repeat_kv(v))


@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_scores_less_their_maximum(name):
    mask, is_mask_kept = FLOAT_MASKS[name]
    gm = rewritten(partial(step, attend=less_maximum, mask=mask), *inputs(), also=EDGES, tolerance=1e-6)
    assert {"k_new", "v_new", "slot"} <= the_attention(gm).keys()
    assert ("mask" in the_attention(gm)) == is_mask_kept


def scaled_by_sinks(q, k, v, mask=None, *, sinks, is_double=False):
    """As Granite attends with windows."""
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3
    if mask is not None:
        scores = scores + mask
    sums = torch.logsumexp(scores, dim=-1)
    factor = (sums - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(2 * scores if is_double else scores, dim=-1, dtype=torch.float32).to(q.dtype)
    attended = torch.matmul(F.dropout(weights, 0.0, training=False), repeat_kv(v))
    return attended * factor.unsqueeze(-1).to(attended.dtype)


def a_step_scaled_by_sinks(q, k_new, v_new, k, v, counter, sinks, mask=lambda counter: None, **form):
    return step(q, k_new, v_new, k, v, counter, partial(scaled_by_sinks, sinks=sinks, **form), mask)


# Where a row sees nothing, it is zero as beside sinks, and not a number in eager.
@pytest.mark.parametrize("name", [name for name in FLOAT_MASKS if " in a " not in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_scaled_by_sinks(name, dtype):
    mask, _ = FLOAT_MASKS[name]

    def of_dtype(counter):
        given = mask(counter)
        return given if given is None else given.to(dtype)

    tolerance = 1e-6 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
    sinks = (2 * torch.randn(H)).to(dtype)
    gm = rewritten(partial(a_step_scaled_by_sinks, mask=of_dtype), *inputs(dtype), sinks, tolerance=tolerance)
    assert {"k_new", "v_new", "slot", "sinks"} <= the_attention(gm).keys()
    assert set(tasks_of(gm)) == {"attention"}


def test_other_scores_scaled_by_sinks_are_left_alone():
    gm = rewritten(partial(a_step_scaled_by_sinks, is_double=True), *inputs(), torch.randn(H))
    assert "sinks" not in str(tasks_of(gm))


def live_positions(mask):
    """Per row, 1 + the last position that any head attends to; None where eager would average all."""
    return [[int(h.nonzero().max()) + 1 if h.any() else None for h in row] for row in mask[:, :, 0]]


@pytest.mark.parametrize("is_float", [False, True])
def test_limits_read_from_a_mask(is_float):
    mask = torch.rand(B, H, 1, L) < 0.2
    mask[..., 19:] = False
    mask[0, 1] = mask[2] = False
    given = torch.where(mask, 0.0, MIN) if is_float else mask

    gm = rewritten(lambda q, k, v, m: (sdpa(q, k, v, m),), inputs()[0], *inputs()[3:5], given)
    limit = the_attention(gm)["limit"]
    gm.graph.output_node().args = ((limit,),)
    gm.recompile()
    (actual,) = gm(inputs()[0], *inputs()[3:5], given)
    dead = L if is_float else 0
    assert actual.tolist() == [max(dead if n is None else n for n in row) for row in live_positions(mask)]


@pytest.mark.parametrize("attend", [sdpa, eager])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, MIN])
def test_numbers_in_a_mask(number, attend):
    given = torch.zeros(B, 1, 1, L)
    given[..., 9:] = -torch.inf
    given[0, ..., 15] = number
    given[1] = number
    rewritten(lambda q, k, v, m: (attend(q, k, v, m),), inputs()[0], *inputs()[3:5], given)


def test_one_limit_serves_every_layer():
    def function(q, k_new, v_new, k, v, counter, k2, v2):
        mask = causal(counter)
        other = torch.rand_like(mask.float()) > 2
        slot = torch.arange(1) + counter
        for keys, values in ((k, v), (k2, v2)):
            keys.index_copy_(2, slot, k_new)
            values.index_copy_(2, slot, v_new)
            q = sdpa(q, keys, values, mask) + sdpa(q, keys, values, other)
        return (q,)

    gm = patterns.apply(graph_of(function, *inputs(), *inputs()[3:5]))
    a, b, c, d = (call["limit"] for call in operands_of(gm, "attention"))
    assert a.args[0] is c.args[0]
    assert b.args[0] is d.args[0]


def reads_cache(k, v, k_new):
    return k.sum()


def reads_cache_through_a_view(k, v, k_new):
    return v[:, :, 3].exp()


def writes_cache(k, v, k_new):
    k[:, :, 5].mul_(2)


def overwrites_source(k, v, k_new):
    k_new.zero_()


@pytest.mark.parametrize("attend", [sdpa, eager])
@pytest.mark.parametrize("between", [reads_cache, reads_cache_through_a_view, writes_cache, overwrites_source])
def test_a_write_that_others_see_is_not_absorbed(between, attend):
    gm = rewritten(partial(step, attend=attend, between=between), *inputs())
    assert "k_new" not in the_attention(gm)
    assert [node.target for node in gm.graph.nodes].count(aten.index_copy_.default) == 2


def test_only_the_last_write_is_absorbed():
    def clear(k, v):
        k.index_copy_(2, torch.tensor([1]), torch.zeros(B, G, 1, D))
        v.zero_()

    gm = rewritten(partial(step, attend=sdpa, before=clear), *inputs())
    assert "k_new" in the_attention(gm)
    assert [node.target for node in gm.graph.nodes].count(aten.index_copy_.default) == 1


@pytest.mark.parametrize(
    "slot", [lambda c: torch.stack((c, c + 1)), lambda c: c.expand(1), lambda c: torch.arange(1) + c.int()]
)
def test_slots(slot):
    """Two rows at once, a view of the counter that has advanced since, and int32."""
    function = partial(step, attend=sdpa, slot=slot)
    args = inputs()
    if slot(args[-1]).numel() == 2:
        args[1], args[2] = (torch.randn(B, G, 2, D) for _ in "kv")
    if slot(args[-1]).dtype == torch.int32:
        with pytest.raises(Exception, match=r"[Ll]ong|int64"):  # so eager refuses it too
            graph_of(function, *args)(*clones(args))
        return
    gm = rewritten(function, *args)
    assert ("k_new" in the_attention(gm)) == (slot(args[-1]).numel() == 1)


def test_caches_written_at_different_slots():
    def function(q, k_new, v_new, k, v, counter):
        k.index_copy_(2, torch.arange(1) + counter, k_new)
        counter.add_(1)
        v.index_copy_(2, torch.arange(1) + counter, v_new)
        return (sdpa(q, k, v),)

    assert "k_new" not in the_attention(rewritten(function, *inputs()))


def test_equal_slots_computed_twice():
    def function(q, k_new, v_new, k, v, counter):
        k.index_copy_(2, torch.arange(1) + counter, k_new)
        v.index_copy_(2, torch.arange(1) + counter, v_new)
        return (sdpa(q, k, v),)

    assert "k_new" in the_attention(rewritten(function, *inputs()))


def test_one_cache_for_keys_and_values():
    def function(q, k_new, v_new, k, v, counter):
        k.index_copy_(2, torch.arange(1) + counter, k_new)
        return (sdpa(q, k, k),)

    assert "k_new" not in the_attention(rewritten(function, *inputs()))


def test_caches_that_are_views_of_one_tensor():
    def function(q, k_new, v_new, both, counter):
        k, v = both[0], both[1]
        slot = torch.arange(1) + counter
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        return (sdpa(q, k, v),)

    q, k_new, v_new, k, v, counter = inputs()
    assert "k_new" not in the_attention(rewritten(function, q, k_new, v_new, torch.stack((k, v)), counter))


def test_the_cache_can_be_returned():
    def function(*args):
        return *step(*args, attend=sdpa), args[3], args[4][:, :, :2]

    assert "k_new" in the_attention(rewritten(function, *inputs()))


def test_weights_that_are_returned_keep_the_write_before_them():
    def function(q, k_new, v_new, k, v, counter):
        slot = torch.arange(1) + counter
        k.index_copy_(2, slot, k_new)
        v.index_copy_(2, slot, v_new)
        weights = torch.softmax(torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3, -1, dtype=torch.float32)
        return torch.matmul(weights, repeat_kv(v)), weights

    assert "k_new" not in the_attention(rewritten(function, *inputs()))


def test_a_cache_overwritten_between_its_copy_and_the_attention():
    def function(q, k, v):
        keys, values = repeat_kv(k), repeat_kv(v)
        k.zero_()
        return (F.scaled_dot_product_attention(q, keys, values),)

    assert tasks_of(rewritten(function, inputs()[0], *inputs()[3:5])) == {}


def test_a_mask_overwritten_after_its_comparison():
    def mask(counter):
        visible = causal(counter).expand(B, 1, 1, L).contiguous()
        visible[:, :, :, 2] = False
        visible[1].logical_not_()
        return visible

    gm = rewritten(partial(step, attend=sdpa, mask=mask), *inputs())
    assert all("mask" in call for call in operands_of(gm, "attention"))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: (F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v)[..., :8]),),
        lambda q, k, v: (eager(q, k, v, dtype=torch.float64).float(),),
        lambda q, k, v: (eager(q, k, v, torch.ones(B, 1, 1, L, dtype=torch.bool)),),
        lambda q, k, v: (eager(q, k, v, torch.zeros(B, 1, 1, 1)),),
        lambda q, k, v: (torch.matmul(torch.softmax(q @ repeat_kv(k).mT, -1), repeat_kv(v)),),
        lambda q, k, v: (torch.matmul(torch.softmax((q @ repeat_kv(k).mT) * 0.3, -2), repeat_kv(v)),),
        lambda q, k, v: (torch.matmul(torch.softmax((q @ repeat_kv(k).mT) * 0.3, -1).mul(2), repeat_kv(v)),),
    ],
)
def test_what_is_no_decode_attention(function):
    assert tasks_of(rewritten(function, inputs()[0], *inputs()[3:5])) == {}


def test_softmax_in_the_dtype_of_scores():
    args = [t.bfloat16() for t in (inputs()[0], *inputs()[3:5])]
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    gm = rewritten(lambda q, k, v: (eager(q, k, v, dtype=None),), *args, tolerance=tolerance)
    assert set(tasks_of(gm)) == {"attention"}


def test_dropout_is_not_lifted():
    gm = patterns.apply(graph_of(lambda q, k, v: (sdpa(q, k, v, dropout_p=0.1),), inputs()[0], *inputs()[3:5]))
    assert tasks_of(gm) == {}


def test_a_negative_position_averages_like_eager():
    """The comparison is with a position that no cache write checks."""

    def function(q, k, v, position):
        return (eager(q, k, v, added(torch.arange(L) <= position)),)

    gm = graph_of(function, inputs()[0], *inputs()[3:5], torch.tensor([3]))
    for position in (-5, -1, 0, L - 1, L + 5):
        assert_same(gm, patterns.apply(gm), inputs()[0], *inputs()[3:5], torch.tensor([position]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_limit_behind_the_largest_number_is_everything(dtype: torch.dtype) -> None:
    def step(q, k, v, bound):
        mask = (torch.arange(24) <= bound)[None, None].expand(1, 1, 1, 24)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = [torch.randn(1, 2, n, 8) for n in (1, 24, 24)]
    ours = torch.compile(step, backend="mpk", options={"fallback": "error"})
    info = torch.iinfo(dtype)
    with torch.inference_mode():
        for bound in (3, info.max - 1, info.max, -1, info.min):
            call = *inputs, torch.tensor([[bound]], dtype=dtype)
            torch.testing.assert_close(ours(*call), step(*call), rtol=1e-5, atol=1e-5)
