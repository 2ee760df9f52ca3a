"""Rows of a prompt, quantised once for all FP8 linears that read them."""

import torch

from torch_mpk.errors import TaskError
from torch_mpk.registry import task
from torch_mpk.tasks.quantized_linear import E4M3, LARGEST_E4M3, e4m3_scales


@task(
    "x[R, S, C], scale[1]? -> numbers[R, S, C], scales[R, S]: float32",
    role="tile",
    tile={"R": 8, "S": 8},
    behind_rows=True,
    samples=[
        {"R": 3, "S": 2, "C": 128, "scale": None},
        {"R": 9, "S": 1, "C": 320, "scale": None},
        {"R": 2, "S": 17, "C": 20, "scale": torch.float32},
    ],
)
def quantise_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, each block of C elements divided by its scale and rounded to float8_e4m3fn; and the scales.

    A block's scale is its largest magnitude over 448, at least 1e-12, or ``scale`` if that is given. What exceeds 448
    becomes 448. ``quantized_linear`` quantises x alike; a schedule does it once for all readers of x, where x has
    several rows: behind what makes whole rows, or in a phase of its own.
    Raises TaskError when ``scale`` is not float32.
    """
    if scale is not None and scale.dtype != torch.float32:
        raise TaskError(f"quantise_rows: scale is {scale.dtype}, expected torch.float32")
    computed = x.to(torch.float32)
    scales = e4m3_scales(computed).squeeze(-1) if scale is None else scale.expand(x.shape[:-1]).contiguous()
    return (computed / scales[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3), scales
