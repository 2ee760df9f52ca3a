"""Steps of a sharded model with random delays, of which every rank must have the same bits each time:

torchrun --nproc-per-node 2 -m tests.ranks.soak --steps 10000

Where there is one GPU all ranks take turns on it, which takes milliseconds for each exchange: 100 steps will do.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from transformers import Qwen3Config, StaticCache

import torch_mpk
from torch_mpk.generate import rewind
from torch_mpk.runtime.segment import live_segments
from torch_mpk.testing.models import random_sharded_model

POSITION = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    if torch.cuda.device_count() == 1:
        os.environ |= {"LOCAL_RANK": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        dist.init_process_group("gloo")  # NCCL takes a GPU once
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = random_sharded_model(config, device)
    ids = torch.arange(args.batch * POSITION, device=device).view(args.batch, -1)
    step = torch.compile(model, backend="mpk", options={"fallback": "error"})
    right = None
    begin = time.perf_counter()
    with torch.no_grad():
        cache = StaticCache(config=config, max_cache_len=64)
        model(input_ids=ids, past_key_values=cache)
        for number in range(args.steps):
            rewind(cache, POSITION)
            logits = step(input_ids=ids[:, :1], past_key_values=cache).logits
            for segment in live_segments() if device.type == "cuda" else ():
                segment.executable.jitter = dist.get_world_size() * number + dist.get_rank() + 1
            right = logits.clone() if right is None else right
            if number % 50 == 0:
                assert torch.equal(logits, right), f"step {number} has other bits"
    torch_mpk.synchronize()
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, right.cpu())
    assert all(torch.equal(each, right.cpu()) for each in everybodys), "ranks have different bits"
    if dist.get_rank() == 0:
        print(
            f"{args.steps} steps, the same bits on {dist.get_world_size()} ranks, {time.perf_counter() - begin:.0f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
