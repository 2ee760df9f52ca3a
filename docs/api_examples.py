"""An example of each name of the API. docs/reference.py puts it onto the page, and a test runs the file.

An example begins with a comment that has the name, and goes on to the next. What stands in front of all is for all.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

import torch_mpk
from torch_mpk import jit

sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "vocab_size": 128}
config = Qwen3Config(**sizes, num_key_value_heads=2, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
prompt = torch.randint(128, (1, 5))
with torch.inference_mode():
    cache = StaticCache(config=config, max_cache_len=32)
    token = model(input_ids=prompt, past_key_values=cache).logits[:, -1:].argmax(-1)

# torch_mpk.precompile
step = torch_mpk.precompile(model, input_ids=token, past_key_values=cache)
with torch.inference_mode():
    logits = step(input_ids=token, past_key_values=cache).logits  # launches, and compiles nothing

# torch_mpk.explain
report = torch_mpk.explain(model, input_ids=token, past_key_values=cache)
print(report)

# torch_mpk.Report
assert report.num_megakernels == 1 and report.num_operations == 0
assert report.share("flops") == 1.0

# torch_mpk.generate
stats: dict[str, float] = {}
tokens = torch_mpk.generate(model, prompt, max_new_tokens=8, do_sample=True, top_p=0.9, stats=stats)
assert tokens.shape == (1, 5 + 8) and stats["tokens_per_second"] > 0

# torch_mpk.profile
with torch.inference_mode():
    profile = torch_mpk.profile(lambda: step(input_ids=token, past_key_values=cache), "timeline.json.gz", steps=2)
print(profile)

# torch_mpk.Profile
(kernel_times,) = profile.kernels
assert profile.path.exists()

# torch_mpk.KernelTimes
print(f"{kernel_times.us:.0f} us a launch, {kernel_times.num_bytes / 1e6:.1f} MB")

# torch_mpk.TaskTimes
longest = max(kernel_times.tasks, key=lambda times: times.us)
print(f"{longest.tasks}: {longest.us:.0f} us in {longest.num_phases} phases")

# torch_mpk.synchronize
with torch.inference_mode():
    step(input_ids=token, past_key_values=cache)
torch_mpk.synchronize()  # raises here what a launch on a GPU did wrong


# torch_mpk.task
@torch_mpk.task("x[R, H], scale[R] -> y[R, H]", samples=[{"R": 2, "H": 64}])
def scale_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each row of ``x`` times a number of its own."""
    return x * scale[:, None]


assert torch.equal(torch.ops.mpk.scale_rows(torch.ones(2, 3), torch.ones(2)), torch.ones(2, 3))

# torch_mpk.kernel_of
kernel = torch_mpk.kernel_of(scale_rows)
x, scale = torch.randn(4, 64), torch.randn(4)
torch.testing.assert_close(kernel(x, scale), x * scale[:, None])


# torch_mpk.jit.kernel
@jit.kernel(
    "void twice(const float* x, float* y, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = 2 * x[i]; }",
    "x[...]: float32 -> y[...]: float32",
    "twice(x, y, numel(x))",
)
def twice(x):
    """Twice each element."""


assert torch.equal(twice(x), 2 * x)

# torch_mpk.jit.module
shifts = jit.module("""
    template <int kBy>
    void shift(const float* x, float* y, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = x[i] + kBy; }
""")


@shifts.kernel("x[N]: float32 -> y[N]: float32", "shift<BY>(x, y, N)")
def shift(x, *, BY: int = 1):  # noqa: N803
    """x plus a constant."""


assert torch.equal(shift(torch.ones(3), BY=4), torch.full((3,), 5.0))


# torch_mpk.jit.by_device
@jit.kernel(
    "__global__ void twice(const float* x, float* y, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = 2 * x[i]; }",
    "x[...]: float32 -> y[...]: float32",
    "twice<<<1, 1>>>(x, y, numel(x))",
)
def twice_cuda(x):
    """Twice each element."""


twice_anywhere = jit.by_device(cpu=twice, cuda=twice_cuda)
assert torch.equal(twice_anywhere(x), 2 * x)

# torch_mpk.get_configurations_from_gpu
num_workers, num_schedulers = torch_mpk.get_configurations_from_gpu(0)
assert num_workers >= 1 and num_schedulers == 0

# torch_mpk.PersistentKernel
out = torch.empty(4, 64)
with torch_mpk.PersistentKernel(test_mode=True) as pk:
    program = {name: pk.attach_input(t, name) for name, t in {"x": x, "weight": torch.ones(64), "out": out}.items()}
    pk.rmsnorm_layer(program["x"], program["weight"], program["out"])
    pk.compile()
    pk.run_test_mode()
torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))

# torch_mpk.GlobalTensor
with torch_mpk.PersistentKernel(test_mode=True) as pk:
    attached = pk.attach_input(x, "x")
    assert isinstance(attached, torch_mpk.GlobalTensor) and attached.dim(0) == 4

# torch_mpk.TBGraph
with torch_mpk.PersistentKernel(test_mode=True) as pk:
    graph = torch_mpk.TBGraph((4, 1, 1))
    graph.new_input(pk.attach_input(x, "x"), (0, -1, -1))
    graph.new_input(pk.attach_input(torch.ones(64), "weight"), (-1, -1, -1))
    graph.new_input(pk.attach_input(out, "out"), (0, -1, -1), is_write=True)
    pk.register_task(graph, "rms_norm", {"eps": 1e-6, "style": "llama"})
    pk.compile()
    pk.run_test_mode()

# torch_mpk.quantize
try:
    torch_mpk.quantize(model, "int8")  # in place
except torch_mpk.MpkError as error:
    print(error)  # torchao is not installed
