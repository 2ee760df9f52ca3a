"""Batches of requests over paged caches, against each request alone in plain PyTorch."""

import pytest
import torch

import torch_mpk
from torch_mpk import PersistentKernel
from torch_mpk.errors import LayerError
from torch_mpk.persistent_kernel.paged import META_TENSORS, places

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, GROUPS, D, LONGEST = 4, 2, 16, 300


def batch(requests, page_size, num_pages, device="cpu"):
    """Meta tensors of requests, as (new tokens, length with them), with pages in random order."""
    counts = [-(-length // page_size) for _, length in requests]
    pages = torch.randperm(num_pages)[: sum(counts)].split(counts)
    tensors = (
        [0, *torch.tensor([new for new, _ in requests]).cumsum(0).tolist()],
        [0, *torch.tensor(counts).cumsum(0).tolist()],
        torch.cat(pages).tolist() + [0] * (num_pages - sum(counts)),
        [length - (count - 1) * page_size for (_, length), count in zip(requests, counts)],
    )
    meta = {name: torch.tensor(t, dtype=torch.int32, device=device) for name, t in zip(META_TENSORS, tensors)}
    return meta, pages


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attend_alone(qkv, k_past, v_past, q_norm, k_norm, cos, sin):
    """One request: new tokens [N, heads + 2 groups, D] after a past [L, groups, D]; returns outputs and the caches."""
    q, k, v = qkv.split([HEADS, GROUPS, GROUPS], 1)
    at = torch.arange(len(k_past), len(k_past) + len(q), device=q.device)
    cos, sin = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
    norm = torch.nn.functional.rms_norm
    q, k = rotate(norm(q, (D,), q_norm, 1e-6), cos, sin), rotate(norm(k, (D,), k_norm, 1e-6), cos, sin)
    k, v = torch.cat((k_past, k)), torch.cat((v_past, v))
    mask = torch.arange(len(k), device=q.device) <= at.unsqueeze(1)
    heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1), k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_requests_of_several_lengths(page_size, device):
    num_pages, tokens = 24, 8  # the last token belongs to no request
    meta, _ = batch([(1, 1)] * 3, page_size, num_pages, device)
    caches = [torch.randn(num_pages, page_size, GROUPS, D, device=device) for _ in range(2)]
    q_norm, k_norm = torch.randn(D, device=device), torch.randn(D, device=device)
    cos, sin = torch.randn(LONGEST, D, device=device), torch.randn(LONGEST, D, device=device)
    qkv = torch.randn(tokens, HEADS + 2 * GROUPS, D, device=device)
    packed = torch.empty(tokens, GROUPS, HEADS // GROUPS + 2, D, device=device)
    out = torch.full((tokens, HEADS * D), torch.nan, device=device)
    with PersistentKernel(test_mode=True, meta_tensors=meta) as kernel:
        inputs = {"packed": packed.view(tokens, -1), "k": caches[0], "v": caches[1], "q_norm": q_norm, "k_norm": k_norm}
        inputs |= {"cos": cos, "sin": sin, "out": out}
        attached = [kernel.attach_input(t, name) for name, t in inputs.items()]
        kernel.paged_attention_layer(*attached, grid_dim=(1, GROUPS, 1))
        kernel.compile()
        for requests in ([(1, 1), (2, page_size), (4, page_size + 3)], [(3, 200), (1, 130), (3, 17)]):
            new_meta, pages = batch(requests, page_size, num_pages, device)
            for name, tensor in meta.items():  # requests change between runs, the kernel does not
                tensor.copy_(new_meta[name])
            q, k, v = qkv.normal_().split([HEADS, GROUPS, GROUPS], 1)
            packed.copy_(torch.cat((q.unflatten(1, (GROUPS, -1)), k.unsqueeze(2), v.unsqueeze(2)), 2))
            before = [cache.clone() for cache in caches]
            out.fill_(torch.nan)
            kernel.run_test_mode()
            torch_mpk.synchronize()
            begin, untouched = 0, torch.ones(num_pages * page_size, dtype=torch.bool, device=device)
            for (new, length), own in zip(requests, pages):
                own = own.to(device)
                past = [cache[own].flatten(0, 1)[: length - new] for cache in before]
                expected, *filled = attend_alone(qkv[begin : begin + new], *past, q_norm, k_norm, cos, sin)
                torch.testing.assert_close(out[begin : begin + new], expected.flatten(1), rtol=1e-4, atol=1e-5)
                for cache, want in zip(caches, filled):
                    torch.testing.assert_close(cache[own].flatten(0, 1)[:length], want)
                rows = (own.unsqueeze(1) * page_size + torch.arange(page_size, device=device)).flatten()
                untouched[rows[length - new : length]] = False
                begin += new
            assert not out[begin:].any()
            for cache, old in zip(caches, before):
                assert torch.equal(cache.flatten(0, 1)[untouched], old.flatten(0, 1)[untouched])


def test_a_fused_projection_and_its_attention():
    page_size, tokens, hidden = 16, 2, 32
    meta, pages = batch([(1, 20), (1, 3)], page_size, 6)
    weights = [torch.randn(n * D, hidden) / hidden**0.5 for n in (HEADS, GROUPS, GROUPS)]
    x, ones = torch.randn(tokens, hidden), torch.ones(D)
    caches = [torch.randn(6, page_size, GROUPS, D) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    cos, sin = torch.randn(64, D), torch.randn(64, D)
    out = torch.full((tokens, HEADS * D), torch.nan)
    with PersistentKernel(test_mode=True, meta_tensors=meta) as kernel:
        parts = [kernel.attach_input(w, f"w{i}") for i, w in enumerate(weights)]
        fused = kernel.fuse_tensors(parts, 0, GROUPS, "qkv")
        qkv = kernel.linear_layer(input=kernel.attach_input(x, "x"), weight=fused)
        rest = [kernel.attach_input(t, f"t{i}") for i, t in enumerate((*caches, ones, ones.clone(), cos, sin, out))]
        kernel.paged_attention_layer(qkv, *rest, eps=1e-6, style="torch")
        kernel.compile()
        kernel.run_test_mode()
    made = torch.cat([(x @ w.T).unflatten(1, (-1, D)) for w in weights], 1)
    for t, (length, own) in enumerate(zip((20, 3), pages)):
        past = [cache[own].flatten(0, 1)[: length - 1] for cache in before]
        expected, *_ = attend_alone(made[t : t + 1], *past, ones, ones, cos, sin)
        torch.testing.assert_close(out[t], expected.flatten(), rtol=1e-4, atol=1e-5)


def test_places_of_tokens():
    def of(tokens, *meta):
        return [t.tolist() for t in places(tokens, 4, *(torch.tensor(t, dtype=torch.int32) for t in meta))]

    # Requests of 2 tokens, 0 tokens and 1 token, with 6, 3 and 4 positions, and a token that is none's.
    first, position, limit, row = of(4, [0, 2, 2, 3], [0, 2, 3, 4], [7, 5, 9, 1], [2, 3, 4])
    assert first[:3] == [0, 0, 3]
    assert position[:3] == [4, 5, 3]
    assert limit == [5, 6, 4, 0]
    assert row == [5 * 4, 5 * 4 + 1, 1 * 4 + 3, -1]
    assert of(1, [0, 1], [0, 0], [2], [0])[2:] == [[0], [-1]]  # no page
    assert of(1, [0, 1], [0, 3], [2], [1])[2:] == [[0], [-1]]  # more pages than there are entries
    assert of(1, [0, 1], [0, 1, 2], [2, 3], [5])[2:] == [[0], [-1]]  # which would be another request's page
    assert of(1, [0, 1], [0, 1], [2], [0])[2:] == [[0], [-1]]


def test_what_is_missing_is_named():
    kernel = PersistentKernel()
    cache, table = kernel.attach_input(torch.zeros(3, 16, 2, 8), "c"), kernel.attach_input(torch.zeros(9, 8), "t")
    x = kernel.attach_input(torch.zeros(1, 56), "x")
    with pytest.raises(LayerError, match=r"paged_attention_layer: it needs the meta tensor 'qo_indptr_buffer', int32"):
        kernel.paged_attention_layer(x, cache, cache, None, None, table, table)
    kernel.meta_tensors |= {name: torch.zeros(2, dtype=torch.int64) for name in META_TENSORS}
    with pytest.raises(LayerError, match=r"'qo_indptr_buffer' is torch.int64, expected torch.int32"):
        kernel.paged_attention_layer(x, cache, cache, None, None, table, table)
    sizes = dict(zip(META_TENSORS, (2, 2, 5, 1)))
    kernel.meta_tensors |= {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
    with pytest.raises(LayerError, match=r"input has shape \(1, 56\), expected \[tokens, \(n \+ 2\) \* 2 \* 8\]"):
        kernel.paged_attention_layer(x, cache, cache, None, None, table, table)
    y = kernel.attach_input(torch.zeros(1, 64), "y16")
    half = kernel.attach_input(torch.zeros(9, 8, dtype=torch.bfloat16), "half")
    with pytest.raises(LayerError, match=r"input=y16 is torch.float32 and cos_pos_embed=half is torch.bfloat16"):
        kernel.paged_attention_layer(y, cache, cache, None, None, half, table)
    other = PersistentKernel(meta_tensors={name: torch.zeros(2, dtype=torch.int32) for name in META_TENSORS})
    shapes = ((1, 64), (3, 16, 2, 8), (3, 16, 2, 8), (9, 8), (9, 8))
    q, k, v, c, s = (other.attach_input(torch.zeros(shape), str(i)) for i, shape in enumerate(shapes))
    with pytest.raises(LayerError, match=r"meta tensors have shapes .*expected \[requests \+ 1\] of both indptr"):
        other.paged_attention_layer(q, k, v, None, None, c, s)
    with pytest.raises(LayerError, match=r"q_norm has shape \(9, 8\), expected \[8\]"):
        kernel.paged_attention_layer(
            kernel.attach_input(torch.zeros(1, 64), "y"), cache, cache, table, None, table, table
        )
