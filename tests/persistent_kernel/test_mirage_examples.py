"""Two programs written for Mirage's test mode: they run as they are but for the import and the device."""

import json

import pytest
import torch

import torch_mpk as mirage
from torch_mpk import PersistentKernel

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
