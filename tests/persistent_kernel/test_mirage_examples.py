"""Programs written for Mirage's test mode: they run as they are but for the import and the device."""

import json

import pytest
import torch

import torch_mpk as mirage
from tests.persistent_kernel.test_paged_attention import GROUPS, HEADS, D, attend_alone, batch
from torch_mpk import warn_once as announcements
from torch_mpk.errors import MpkWarning
from torch_mpk.mpk.persistent_kernel import PersistentKernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def torch_rmsnorm(x, w, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


@pytest.mark.parametrize("device", DEVICES)
def test_rmsnorm(device, tmp_path):
    # 1. Configure
    num_workers, num_schedulers = mirage.get_configurations_from_gpu(0)
    params = PersistentKernel.get_default_init_parameters()
    params["test_mode"] = True
    params["num_workers"] = num_workers
    params["num_local_schedulers"] = num_schedulers
    params["mpi_rank"] = 0
    params["world_size"] = 1
    pk = PersistentKernel(**params)

    # 2. Create tensors and attach (both inputs AND outputs)
    x = torch.randn(16, 4096, dtype=torch.bfloat16, device=device)
    w = torch.randn(4096, dtype=torch.bfloat16, device=device)
    out = torch.full((16, 4096), torch.nan, dtype=torch.bfloat16, device=device)
    x_dt = pk.attach_input(x, name="x")
    w_dt = pk.attach_input(w, name="w")
    out_dt = pk.attach_input(out, name="out")

    # 3. Build layer(s)
    block_dim = (256, 1, 1) if pk.target_cc >= 90 else (128, 1, 1)
    pk.rmsnorm_layer(input=x_dt, weight=w_dt, output=out_dt, grid_dim=(16, 1, 1), block_dim=block_dim)

    # 4. Compile and run
    pk.compile(output_dir=str(tmp_path))
    pk.run_test_mode()
    synchronize(device)

    # 5. Compare: `out` is now modified in place
    torch.testing.assert_close(out, torch_rmsnorm(x, w), rtol=0, atol=0.04)

    # 6. Clean up
    pk.finalize()
    assert [node["task"] for node in json.loads((tmp_path / "4.graph.json").read_text())["nodes"]] == ["rms_norm"]
    assert (tmp_path / "6.kernel.cu").exists() == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_qwen3_mlp(device):
    batch_size, hidden_size, intermediate_size, num_tasks = 8, 512, 1536, 24
    block_args = {"dtype": torch.bfloat16, "device": device}

    params = PersistentKernel.get_default_init_parameters()
    params["test_mode"] = True
    params["num_workers"], params["num_local_schedulers"] = mirage.get_configurations_from_gpu(0)
    params["max_num_batched_tokens"] = batch_size
    params["meta_tensors"] = {"qo_indptr_buffer": torch.zeros(batch_size + 1, dtype=torch.int32, device=device)}
    pk = PersistentKernel(**params)

    x = torch.randn(batch_size, hidden_size, **block_args)
    w_gate = torch.randn(intermediate_size, hidden_size, **block_args) / hidden_size**0.5
    w_up = torch.randn(intermediate_size, hidden_size, **block_args) / hidden_size**0.5
    w_down = torch.randn(hidden_size, intermediate_size, **block_args) / intermediate_size**0.5
    residual = torch.randn(batch_size, hidden_size, **block_args)
    mlp_mid = torch.full((batch_size, 2 * intermediate_size), torch.nan, **block_args)
    silu_out = torch.full((batch_size, intermediate_size), torch.nan, **block_args)
    mlp_out = torch.full((batch_size, hidden_size), torch.nan, **block_args)
    input_dt = pk.attach_input(x, name="input")
    w_gate_dt = pk.attach_input(w_gate, name="w_gate")
    w_up_dt = pk.attach_input(w_up, name="w_up")
    w_down_dt = pk.attach_input(w_down, name="w_down")
    residual_dt = pk.attach_input(residual, name="residual")
    mlp_mid_dt = pk.attach_input(mlp_mid, name="mlp_mid")
    silu_out_dt = pk.attach_input(silu_out, name="silu_out")
    mlp_out_dt = pk.attach_input(mlp_out, name="mlp_out")
    block_dim = (256, 1, 1) if pk.target_cc >= 90 else (128, 1, 1)

    w_gatedup_dt = pk.shuffle_tensors(
        inputs=[w_gate_dt, w_up_dt], shuffled_dim=0, num_groups=num_tasks // 2, name="w_gatedup"
    )
    pk.linear_layer(
        input=input_dt, weight=w_gatedup_dt, output=mlp_mid_dt, grid_dim=(num_tasks, 1, 1), block_dim=block_dim
    )
    pk.silu_mul_layer(input=mlp_mid_dt, output=silu_out_dt, grid_dim=(num_tasks // 2, 1, 1), block_dim=block_dim)
    pk.linear_with_residual_layer(
        input=silu_out_dt, weight=w_down_dt, residual=residual_dt, output=mlp_out_dt,
        grid_dim=(hidden_size // 64, 1, 1), block_dim=block_dim,
    )  # fmt: skip
    pk.compile()
    pk.run_test_mode()
    synchronize(device)

    # The layout that Mirage's kernels work on: group by group, the gate's rows and then the up projection's.
    groups = zip(w_gate.chunk(num_tasks // 2), w_up.chunk(num_tasks // 2), strict=True)
    w_gatedup = torch.cat([rows for group in groups for rows in group])
    gate, up = x @ w_gate.T, x @ w_up.T
    activated = torch.nn.functional.silu(gate) * up
    for ours, eager in (
        (mlp_mid, x @ w_gatedup.T),
        (silu_out, activated),
        (mlp_out, residual + activated @ w_down.T),
    ):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.04)
    # Weights are read where they are: nothing but products is in the workspace.
    assert pk.schedule.workspace_bytes < w_gate.nbytes / 8
    pk.finalize()


def decoder_layer(mpk, t, tokens, x, next_tokens):
    """By position, with the grids of Mirage's Qwen3: requests along x in attention, K along y in a split-K linear."""
    (requests, hidden_size), vocab_size = x.shape, t["lm_head"].shape[0]
    kv_heads, block_dim = t["k_cache"].shape[2], (256, 1, 1) if mpk.target_cc >= 90 else (128, 1, 1)
    d = {name: mpk.attach_input(tensor, name) for name, tensor in t.items()}
    x_dt = mpk.attach_input(torch_tensor=x, name="x")
    mpk.embed_layer(mpk.attach_input(tokens, "input_token"), d["embed_tokens"], x_dt, (1, 1, 1), (128, 1, 1), 1)
    rmsnorm_out = mpk.new_tensor((requests, hidden_size), None, torch.float32, "rmsnorm_out", "cuda_tensor")
    mpk.rmsnorm_layer(x_dt, d["input_layernorm"], rmsnorm_out, (requests, 1, 1), block_dim)
    w_qkv = mpk.fuse_tensors([d["q_proj"], d["k_proj"], d["v_proj"]], 0, kv_heads)
    attn_in = mpk.new_tensor((requests, w_qkv.dim(0)), None, torch.float32, "attn_in")
    mpk.linear_layer(rmsnorm_out, w_qkv, attn_in, (w_qkv.dim(0) // 64, 1, 1), block_dim)
    attn_out = mpk.new_tensor((requests, d["o_proj"].dim(1)), dtype=torch.float32, name="attn_out")
    mpk.paged_attention_layer(
        attn_in, d["k_cache"], d["v_cache"], d["q_norm"], d["k_norm"], d["cos"], d["sin"], attn_out,
        (mpk.max_num_batched_requests, kv_heads, 1), block_dim,
    )  # fmt: skip
    mpk.splitk_linear_layer(attn_out, d["o_proj"], x_dt, (hidden_size // 16, 8, 1), (256, 1, 1), accumulate=True)
    logits = mpk.new_tensor((requests, vocab_size), dtype=torch.float32, name="logits")
    mpk.linear_layer(x_dt, d["lm_head"], logits, (vocab_size // 8, requests, 1), block_dim)
    mpk.argmax_layer(logits, mpk.attach_input(next_tokens, "next_tokens"), (1, 1, 1), block_dim)


@pytest.mark.parametrize("device", DEVICES)
def test_a_decoder_layer(device):
    requests, hidden_size, page_size, vocab_size = 2, 64, 16, 24
    block_args = {"dtype": torch.float32, "device": device}
    meta_tensors, pages = batch([(1, 20), (1, 3)], page_size, 6, device)
    params = PersistentKernel.get_default_init_parameters()
    params["test_mode"] = True
    params["num_workers"], params["num_local_schedulers"] = mirage.get_configurations_from_gpu(0)
    params["max_seq_length"], params["max_num_pages"], params["page_size"] = 64, 6, page_size
    params["max_num_batched_requests"] = params["max_num_batched_tokens"] = requests
    params["meta_tensors"] = meta_tensors
    mpk = PersistentKernel(**params)
    shapes = {
        "embed_tokens": (vocab_size, hidden_size),
        "input_layernorm": (hidden_size,),
        "q_proj": (HEADS * D, hidden_size),
        "k_proj": (GROUPS * D, hidden_size),
        "v_proj": (GROUPS * D, hidden_size),
        "q_norm": (D,),
        "k_norm": (D,),
        "cos": (64, D),
        "sin": (64, D),
        "k_cache": (6, page_size, GROUPS, D),
        "v_cache": (6, page_size, GROUPS, D),
        "o_proj": (hidden_size, HEADS * D),
        "lm_head": (vocab_size, hidden_size),
    }
    t = {name: torch.randn(shape, **block_args) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    caches = [t["k_cache"].clone(), t["v_cache"].clone()]
    tokens = torch.tensor([[3], [17]], device=device)
    x = torch.full((requests, hidden_size), torch.nan, **block_args)
    next_tokens = torch.full((requests,), -1, device=device)
    decoder_layer(mpk, t, tokens, x, next_tokens)
    mpk.compile()
    mpk.run_test_mode()
    synchronize(device)

    expected = t["embed_tokens"][tokens[:, 0]]
    normed = torch.nn.functional.rms_norm(expected, (hidden_size,), t["input_layernorm"], 1e-6)
    qkv = torch.cat([(normed @ t[f"{name}_proj"].T).unflatten(1, (-1, D)) for name in "qkv"], 1)
    for row, (length, own) in enumerate(zip((20, 3), pages, strict=True)):
        past = [cache[own.to(device)].flatten(0, 1)[: length - 1] for cache in caches]
        y, *_ = attend_alone(qkv[row : row + 1], *past, t["q_norm"], t["k_norm"], t["cos"], t["sin"])
        expected[row] += t["o_proj"] @ y.flatten()
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(next_tokens, (expected @ t["lm_head"].T).argmax(-1))
    mpk.finalize()


def test_what_means_nothing_here_is_taken_and_said_once(recwarn):
    announcements.forget()
    workers, _ = mirage.get_configurations_from_gpu(0)
    arguments = ("online", 2, 1, workers, 4, 1, 512, 8, 16, 64, 128, {}, torch.zeros(1), "qwen3", "eagle", True, 7)
    for _ in range(2):
        pk = PersistentKernel(*arguments, True)
    said = [str(w.message).split("=")[0] for w in recwarn if w.category is MpkWarning]
    hints = """mode world_size mpi_rank num_local_schedulers num_remote_schedulers profiler_tensor trace_name
        spec_decode_config use_cutlass_kernel eos_token_id"""
    assert said == [f"PersistentKernel({name}" for name in hints.split()]
    assert (pk.test_mode, pk.max_num_batched_requests, pk.max_num_pages, pk.page_size) == (True, 8, 64, 128)
