"""Attention of one query position per batch row over a cache of latents, which are keys and values of all heads."""

import torch

from torch_mpk.registry import task


@task(
    "q[B, H, C], q_rope[B, H, R], latent[B, 1, L, C], rope[B, 1, L, R], mask[B, H, L]?, limit[B]?: int64 < L "
    "-> y[B, H, C]",
    tile={"B": 1, "H": 1},
    samples=[
        {"B": 1, "H": 4, "C": 64, "R": 16, "L": 70, "scale": 0.2, "mask": None},
        {"B": 3, "H": 5, "C": 24, "R": 8, "L": 33, "scale": 0.3, "mask": torch.bool},
        {"B": 2, "H": 20, "C": 128, "R": 32, "L": 90, "scale": 0.1, "limit": None},
    ],
)
def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    mask: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    *,
    scale: float,
) -> torch.Tensor:
    """``softmax(scale * (q @ latent.T + q_rope @ rope.T) + mask) @ latent`` per head, in fp32 or wider.

    H heads share L latents of C elements, and as many keys of R elements that are rotated by their positions. ``mask``
    is bool (True: attend) or a float to add. Positions at or beyond ``limit`` are ignored, whatever they hold; a limit
    beyond L means L. A head without a key gives zeros.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2, with the products of keys and values absorbed: a head's
    query has been multiplied by its part of W^UK, and what it gets is still to be multiplied by that of W^UV.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    below = torch.arange(latent.shape[2], device=q.device)
    live = below.expand(latent.shape[0], -1) < (latent.shape[2] if limit is None else limit.unsqueeze(1))
    keys, rotated = (t.squeeze(1).to(wide).where(live.unsqueeze(2), 0.0) for t in (latent, rope))
    scores = (q.to(wide) @ keys.mT + q_rope.to(wide) @ rotated.mT) * scale
    live = live.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        live = live & mask
    elif mask is not None:
        scores = scores + mask
        live = live & (mask != -torch.inf)
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1)
    return (weights @ keys).where(live.any(-1, keepdim=True), 0.0).to(q.dtype)
