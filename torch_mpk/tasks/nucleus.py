"""The end of a nucleus, as in top-p sampling."""

import torch

from torch_mpk.registry import task


@task(
    "x[..., N], rest[...]: float32, peaks[..., C]?, sums[..., C]?: float32 -> least[...], first[...]: int64",
    header="ranks.cuh",
    samples=[
        {"...": (1,), "N": 100, "peaks": None, "sums": None},
        {"...": (2, 3), "N": 1000, "peaks": None, "sums": None},
        {"...": (2,), "N": 4099, "peaks": None, "sums": None},
    ],
)
def nucleus(
    x: torch.Tensor, rest: torch.Tensor, peaks: torch.Tensor | None = None, sums: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of each row of logits when the least likely go, as long as all that go have no more than ``rest`` of
    the probability, and one stays: values above ``least``, and of those equal to it the ones from index ``first`` on.

    ``peaks``, the largest of each of C equal parts of a row, and ``sums``, those of ``exp(x - peak)`` over them, add
    nothing but speed, as in ``nth_largest``; they come together.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751), as Hugging Face's
    ``TopPLogitsWarper`` computes it, where ``rest`` is ``1 - top_p``.
    """
    if not x.is_floating_point():
        raise TypeError(f"nucleus: x must be floating point, got {x.dtype}")
    ascending, order = x.sort(stable=True, dim=-1)
    gone = ascending.softmax(-1, dtype=torch.float32).cumsum(-1) <= rest.unsqueeze(-1)
    position = gone[..., :-1].sum(-1, keepdim=True)
    return ascending.gather(-1, position).squeeze(-1), order.gather(-1, position).squeeze(-1)
