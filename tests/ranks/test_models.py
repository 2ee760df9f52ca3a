"""Models of Transformers whose weights are shared out to several ranks, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig

import torch_mpk
from tests.ranks import sweep
from tests.ranks.team import ROOT, run
from tests.thinned import thinned
from torch_mpk.errors import ArgumentError, EngineError
from torch_mpk.testing.quantized import quantize_linears
from torch_mpk.testing.tiny import random_ids, tiny_model

LENGTH, NEW = 7, 10
pytestmark = pytest.mark.slow


def sharded(
    folder: str, attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16, num_groups: int = 1, **settings: object
) -> torch.nn.Module:
    """``num_groups``: of experts, where whole ones are shared out."""
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_plan="auto", ep_size=num_groups),
        dtype=dtype,
        attn_implementation=attention,
        **settings,
    ).eval()


def generated(rank: int, folder: str, prompts: list[list[int]], options: dict) -> dict[str, object]:
    """Tokens of a sharded model: all that is called runs here, or there is an error."""
    model = sharded(folder)
    torch.manual_seed(rank)
    call = {"max_new_tokens": NEW, "options": {"fallback": "error", "num_threads": 1}, "eos_token_id": []} | options
    mask = torch.tensor(call.pop("attention_mask")) if "attention_mask" in call else None
    found = [
        torch_mpk.generate(model, torch.tensor(prompts), attention_mask=mask, **call)[:, LENGTH:].tolist()
        for _ in range(2)
    ]
    torch.manual_seed(5)
    return {"tokens": found, "logits": logits_of(model, prompts)}


@torch.no_grad()
def logits_of(model: torch.nn.Module, prompts: list[list[int]]) -> list:
    """Of a prompt in one launch."""
    step = torch.compile(model, backend="mpk", options={"fallback": "error", "while_building": "wait"})
    return step(input_ids=torch.tensor(prompts), use_cache=False).logits.float().tolist()


CASES = thinned(
    [
        ("qwen3", 2, {"tie_word_embeddings": True}, {}),
        ("llama", 2, {"num_key_value_heads": 4}, {"do_sample": True, "top_p": 0.9}),
        ("qwen3", 2, {"attention_bias": True}, {"prefill_chunk_size": 16}),
    ]
)


@pytest.mark.parametrize(("arch", "ranks", "config", "options"), CASES, ids=str)
def test_a_sharded_model_says_what_the_whole_says(
    tmp_path: Path, arch: str, ranks: int, config: dict, options: dict
) -> None:
    torch.manual_seed(3)
    whole = tiny_model(arch, **config)
    whole.save_pretrained(tmp_path / "model")
    prompts = random_ids(2, LENGTH)
    results = run(ranks, generated, tmp_path, str(tmp_path / "model"), prompts.tolist(), options)
    assert all(each == results[0] for each in results), "ranks differ"
    with torch.no_grad():
        exact = whole.double()(input_ids=prompts).logits
        own = whole.bfloat16()(input_ids=prompts).logits.double()
    got = torch.tensor(results[0]["logits"], dtype=torch.float64)
    assert (got - exact).norm() <= 1.5 * (own - exact).norm() + 1e-3 * exact.norm()
    if "do_sample" not in options:
        # From the prompt on, each token is the whole model's choice, or nearly so.
        first = torch.tensor(results[0]["tokens"][0])
        with torch.no_grad():
            logits = whole.double()(input_ids=torch.cat([prompts, first], 1)).logits[:, LENGTH - 1 : -1]
        lost = logits.amax(-1) - logits.gather(-1, first[..., None])[..., 0]
        assert lost.max() < 0.05 * logits.std()
        assert results[0]["tokens"][0] == results[0]["tokens"][1]


def test_eight_ranks(tmp_path: Path) -> None:
    torch.manual_seed(3)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    whole = tiny_model("llama", num_layers=1, dtype=torch.float32, **heads)
    whole.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        exact = whole.double()(input_ids=torch.tensor(PROMPT)).logits
    first, *others = run(8, logits_of_sharded, tmp_path, str(tmp_path / "model"))
    assert others == [first] * 7, "ranks differ"
    assert (torch.tensor(first) - exact).norm() < 1e-5 * exact.norm()


def logits_of_sharded(rank: int, folder: str) -> list:
    return logits_of(sharded(folder, dtype=torch.float32), PROMPT)


def families(rank: int, names: list[str], folder: str, quantised: str) -> dict[str, object]:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    found = sweep.see(rank, names, folder)
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None  # it would make them bf16 on a CPU
    model = sharded(quantised, dtype=torch.float32)
    linear = model.model.layers[0].self_attn.o_proj
    assert {str(weight.dtype) for weight in linear.parameters()} == {"torch.float8_e4m3fn", "torch.float32"}
    verdicts = {name: sweep.verdict(found[name]) for name in names}
    experts = sharded(f"{folder}/{names.index('OLMoE')}", dtype=torch.float32, num_groups=2)
    assert len(experts.model.layers[0].mlp.experts.down_proj.to_local()) * 2 == experts.config.num_experts
    found = {"fp8": logits_of(model, PROMPT), "experts": logits_of(experts, PROMPT)}
    return {"verdicts": verdicts, "int8": error_of_int8(folder), **found}


@torch.no_grad()
def error_of_int8(folder: str) -> float:
    """How far the logits of torchao's int8 weights are from eager's: each rank quantises its own part."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = sharded(f"{folder}/int8", dtype=torch.float32, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    assert type(model.model.layers[0].self_attn.o_proj.weight).__name__ == "Int8Tensor"
    eager = model(input_ids=torch.tensor(PROMPT), use_cache=False).logits
    return ((torch.tensor(logits_of(model, PROMPT)) - eager).norm() / eager.norm()).item()


PROMPT = [[1, 2, 3, 4, 5]]


def save_quantised(folder: Path) -> list:
    """A model of FP8 blocks, whose logits it returns."""
    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config

    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    model = quantize_linears(
        tiny_model("llama", dtype=torch.float32, num_layers=1, initializer_range=0.05, **sizes), "fp8"
    )
    model.config.quantization_config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    model.config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return logits_of(model, PROMPT)


def test_families_of_models(tmp_path: Path) -> None:
    """An embedding that is scaled, experts behind norms of all heads (``python -m tests.ranks.sweep`` runs all), FP8
    blocks, of whose weights and scales each rank has its part, torchao's int8 weights, and whole experts a rank."""
    names = ["Gemma 2", "OLMoE"]
    sweep.save(names, tmp_path)
    whole = torch.tensor(save_quantised(tmp_path / "fp8"))
    tiny_model("llama", num_layers=1).save_pretrained(tmp_path / "int8")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(names.index("OLMoE")), dtype=torch.float32)
        experts = model(input_ids=torch.tensor(PROMPT)).logits
    for found in run(2, families, tmp_path, names, str(tmp_path), str(tmp_path / "fp8")):
        assert found["verdicts"] == dict.fromkeys(names, "")
        # Activations that round to another FP8 value are rare where sums are in another order.
        assert (torch.tensor(found["fp8"]) - whole).norm() < 1e-2 * whole.norm()
        assert found["int8"] < 1e-5
        assert (torch.tensor(found["experts"]) - experts).norm() < 1e-5 * experts.norm()


def refused(rank: int, folder: str) -> dict[str, object]:
    from torch_mpk import continuous_batching

    def said(call: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return call(*args, **kwargs)
        except (ArgumentError, EngineError) as error:
            return str(error)

    batched = sharded(folder, continuous_batching.ATTENTION)
    found = {"batch": said(batched.generate_batch, PROMPT, continuous_batching_config=continuous_batching.config())}
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(halves_summed)

    def tokens(seed: int, **settings: object) -> object:
        torch.manual_seed(seed)
        options = {"fallback": "error", "num_threads": 1}
        return torch_mpk.generate(model, torch.tensor(PROMPT), 8, options=options, **settings).tolist()

    found["alone"] = said(tokens, rank, do_sample=True)
    found["alike"] = said(tokens, 5, do_sample=True)
    return found | {"clock": said(tokens, 5, generation_config=GenerationConfig(max_time=60.0))}


def halves_summed(module: torch.nn.Module, args: object, x: torch.Tensor) -> torch.Tensor:
    """As a model's that is shared out by other means than DTensors."""
    half = x / 2
    dist.all_reduce(half)
    return half


def test_what_ranks_cannot_do_together_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    first, second = run(2, refused, tmp_path, str(tmp_path / "model"))
    assert first == second
    assert "shared out to 2 ranks" in first["batch"] and "torch_mpk.generate takes such a model" in first["batch"]
    assert "generator: expected one of the same state on all ranks of group 0" in first["alone"]
    assert len(first["alike"][0]) == len(PROMPT[0]) + 8
    assert "max_time: expected None for a model whose weights are shared out" in first["clock"]


def page(rank: int, folder: str) -> list:
    from tests.test_docs import run_examples

    here = {'"Qwen/Qwen3-32B"': repr(folder), "input_ids, 100": "input_ids, 10"}
    prompt = torch.tensor([[1, 2, 3]])
    return run_examples("docs/parallel.md", here, input_ids=prompt)["tokens"].tolist()


def test_the_page(tmp_path: Path) -> None:
    """docs/parallel.md, on two ranks."""
    tiny_model().save_pretrained(tmp_path / "model")
    first, second = run(2, page, tmp_path, str(tmp_path / "model"))
    assert first == second and len(first[0]) == 13


def test_the_example() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "parallel.py"), "--tokens", "20", "--sample"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *script], capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: " in done.stdout and "def read_lines(path):" in done.stdout
    assert "MpkWarning" not in done.stderr
