"""gpt-oss in MXFP4: loaded as it is stored, and run in one launch, against what Transformers makes of its numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Mxfp4Config, Qwen3Config

import torch_mpk
from tests.codegen.test_expert_runs import kernels
from tests.continuous_batching.engine import GREEDY, alone, batched, prompt_of
from tests.models.mxfp4_checkpoints import SIZES, change_tensors, save_checkpoint
from tests.models.stepping import STRICT, compiled
from tests.models.test_emulated import check_steps
from torch_mpk.capture import mxfp4_experts
from torch_mpk.continuous_batching import ATTENTION
from torch_mpk.errors import CheckpointError
from torch_mpk.testing.tiny import Decoding, random_ids

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gpt-oss")
    save_checkpoint(path)
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["quant_method"] = "mpk_mxfp4"
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **options).eval()


def dequantised(folder: Path) -> Any:
    """By Transformers, in float32, which has all products of the format's numbers exactly."""
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def experts_of(model: Any) -> mxfp4_experts.Mxfp4Experts:
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, mxfp4_experts.Mxfp4Experts)
    return experts


def test_prompts_and_steps_are_one_launch(folder: Path) -> None:
    """Eagerly the same. Weights that are loaded in place are those of the next step."""
    model, dense = load(folder), dequantised(folder)
    torch.compiler.reset()
    step, prompt = compiled(model), random_ids(2, 5)
    with torch.inference_mode():
        assert relative_error(model(prompt).logits, dense(prompt).logits) < 1e-5
        ours, wanted = Decoding(model, prompt), Decoding(dense, prompt)
        for _ in range(2):
            token = random_ids(2, 1)
            assert relative_error(ours.step(step, token), wanted.step(dense, token)) < 1e-5
            experts_of(model).down_proj_scales.view(torch.uint8).add_(1)
            dense.get_submodule(EXPERTS).down_proj.mul_(2)


@pytest.mark.slow
def test_prompts_of_any_length(folder: Path) -> None:
    model, dense = load(folder), dequantised(folder)
    torch.compiler.reset()
    run = compiled(model)
    with torch.inference_mode():
        for length in (3, 70):
            ids = random_ids(1, length)
            assert relative_error(run(ids, use_cache=False).logits, dense(ids).logits) < 1e-5


@pytest.mark.slow
def test_experts_in_bfloat16(folder: Path) -> None:
    """On equal routes: each of the roundings moves some of a whole model's."""
    experts, dense = experts_of(load(folder, torch.bfloat16)), dequantised(folder).get_submodule(EXPERTS)
    x, ids, weights = torch.randn(5, 320).bfloat16(), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2).bfloat16()
    torch.compiler.reset()
    with torch.inference_mode():
        y = torch.compile(experts, backend="mpk", options=STRICT)(x, ids, weights)
        assert y.dtype == torch.bfloat16
        want = dense(x.float(), ids, weights.float())
        assert relative_error(y, want) < 0.01
        assert relative_error(experts(x, ids, weights), want) < 0.01


@pytest.mark.slow
def test_tokens(folder: Path) -> None:
    """The loop and the engine give the same tokens. The engine's steps have several requests."""
    model, dense, prompts = load(folder), dequantised(folder), [prompt_of(5), prompt_of(3)]
    wanted = [alone(dense, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    ids = torch.tensor([prompts[0]])
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = torch_mpk.generate(model, ids, attention_mask=torch.ones_like(ids), **settings)
    assert tokens[0, 5:].tolist() == wanted[0][:4]
    model.set_attn_implementation(ATTENTION)
    assert batched(model, prompts, options={"fallback": "error"}) == wanted


@pytest.mark.slow
def test_the_report_names_the_format(folder: Path) -> None:
    report = torch_mpk.explain(load(folder), random_ids(1, 2), use_cache=False)
    assert report.parts[0].tasks["quantized_expert_linear of float4_e2m1fn_x2"] == 2


@pytest.mark.slow
def test_a_step_emulated(folder: Path) -> None:
    """Rows of both products end between lines of boxes. Eager's own roundings move the logits by up to 2.4 %."""
    model = load(folder, torch.bfloat16)

    def see_step(see: Callable[..., None]) -> None:
        torch.compiler.reset()

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            see(gm, inputs)
            return gm.forward

        with torch.inference_mode():
            Decoding(model, random_ids(2, 5)).step(torch.compile(model, backend=backend), random_ids(2, 1))

    names = [name for name in kernels(check_steps(see_step, tolerance=0.04)) if "expert" in name]
    assert names == ["quantized_expert_linear.interleaved", "quantized_expert_linear.summed"]


def test_a_saved_model_is_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    load(folder, torch.bfloat16).save_pretrained(tmp_path)
    given, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) and given[name].dtype == saved[name].dtype for name in given)
    configs = [AutoConfig.from_pretrained(path).quantization_config for path in (folder, tmp_path)]
    assert configs[0] == configs[1]


def drop(name: str, tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERTS}.{name}"]


def cut(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"][..., 1:]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (functools.partial(drop, "down_proj_scales"), CheckpointError, f"lacks {EXPERTS}.down_proj_scales"),
        (functools.partial(drop, "gate_up_proj_blocks"), CheckpointError, f"lacks {EXPERTS}.gate_up_proj_blocks"),
        (functools.partial(cut, "gate_up_proj_scales"), RuntimeError, "size mismatch|ignore_mismatched_sizes"),
    ],
    ids=["no scales", "no blocks", "wrong sizes"],
)
def test_bad_checkpoints(tmp_path: Path, change: Any, error: type[Exception], message: str) -> None:
    save_checkpoint(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(error, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GptOssConfig(**(SIZES | {"intermediate_size": 80})), "down_proj has 80 columns, expected whole blocks of 32"),
        (Qwen3Config(**SIZES), "Qwen3ForCausalLM has no experts of gpt-oss"),
    ],
    ids=["sizes", "model"],
)
def test_models_that_have_no_such_experts(config: Any, message: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_experts_that_are_shared_out_are_refused(folder: Path) -> None:
    experts = experts_of(load(folder))
    experts._is_expert_parallel = True  # as Transformers marks them while it loads
    with pytest.raises(CheckpointError, match="mlp.experts is shared out to ranks"):
        experts.view_as_numbers("mlp.experts")
