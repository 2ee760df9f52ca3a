"""Every decoder of the zoo that has a tensor-parallel plan, shared out to ranks on the CPU: what of a decode step is
one launch, and why not more.

python -m tests.ranks.sweep  # what docs/parallel.md says of families, in a minute or two; fails where a result is wrong
python -m tests.ranks.sweep --ranks 4 Nemotron Phi
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.ranks.team import run
from torch_mpk.backend import mpk
from torch_mpk.errors import MpkWarning, first_line
from torch_mpk.testing.tiny import random_ids
from torch_mpk.testing.zoo import MODELS, PROMPT_LENGTH, Coverage, Decoder, DecodeSteps

MAX_ERROR = 1e-5  # of logits in float32


def planned() -> list[str]:
    """The decoders of the zoo whose weights a plan of transformers shares out."""
    return [name for name, entry in MODELS.items() if isinstance(entry, Decoder) and _plan_of(entry)]


def _plan_of(entry: Decoder) -> dict[str, str]:
    with torch.device("meta"):
        return dict(entry.make().tp_plan)


def save(names: Sequence[str], folder: Path) -> None:
    """Models of random weights where ``see`` looks for them."""
    for number, name in enumerate(names):
        torch.manual_seed(number)
        entry = MODELS[name]
        assert isinstance(entry, Decoder)
        entry.make().save_pretrained(folder / str(number))


def see(rank: int, names: Sequence[str], folder: str) -> dict[str, dict[str, Any]]:
    """Of each family what ``of_family`` says, or why nothing can be said, ``raised``."""
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        torch.compiler.reset()
        try:
            found[name] = of_family(Path(folder) / str(number))
        except Exception as error:  # of transformers, most often, whose plan does not fit
            found[name] = {"raised": f"{type(error).__name__}: {first_line(error)}"}
    return found


@torch.inference_mode()
def of_family(folder: Path) -> dict[str, Any]:
    """``launches`` and ``graphs`` of a decode step, the ``reasons`` why it is not one launch, whether it ran otherwise
    than as launches, ``fallback``, and how far its logits are from those of the whole model, ``error``."""
    torch.manual_seed(5)
    prompt, token = random_ids(2, PROMPT_LENGTH), random_ids(2, 1)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = DecodeSteps(whole, prompt).step(whole, token)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
    ).eval()
    coverage = Coverage()

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        coverage.add(gm, inputs)
        return mpk(gm, inputs, options={"fallback": "eager", "num_threads": 1})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = DecodeSteps(model, prompt).step(torch.compile(model, backend=backend), token)
    return {
        "graphs": coverage.graphs,
        "launches": coverage.launches,
        "share": coverage.ours / coverage.nodes if coverage.nodes else 0,
        "reasons": list(coverage.reasons),
        "fallback": [str(each.message) for each in caught if issubclass(each.category, MpkWarning)],
        "error": ((got - want).norm() / want.norm()).item(),
    }


def verdict(of_family: dict[str, Any]) -> str:
    """What is not as it should be: a step that is no single launch, or another result. Empty where all is well."""
    if "raised" in of_family:
        return str(of_family["raised"])
    is_one = of_family["graphs"] == of_family["launches"] == of_family["share"] == 1
    why = of_family["fallback"] if is_one else [f"{of_family['launches']} launches", *of_family["reasons"]]
    wrong = [f"logits differ by {of_family['error']:.1e}"] if of_family["error"] > MAX_ERROR else []
    return "; ".join([*why, *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names of the zoo; by default all that have a plan")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    from tests.ranks import sweep  # not __main__, which another process knows nothing of

    names = args.families or planned()
    with tempfile.TemporaryDirectory() as folder:
        save(names, Path(folder))
        ranks = run(args.ranks, sweep.see, Path(folder), names, folder, seconds=3000)
    for name in names:
        verdicts = list(dict.fromkeys(verdict(found[name]) for found in ranks))
        print(f"{name}: {' / '.join(verdicts) or 'one launch'}")
    if any(found[name].get("error", 0) > MAX_ERROR for name in names for found in ranks):
        raise SystemExit("results are wrong")


if __name__ == "__main__":
    main()
