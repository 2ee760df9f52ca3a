"""Generate with a model whose weights are shared out to several processes, each with a GPU of its own or, on the CPU,
some of its threads.

torchrun --nproc-per-node 2 examples/parallel.py                         # the small byte-level model beside this file
torchrun --nproc-per-node 2 examples/parallel.py --model Qwen/Qwen3-32B  # a checkpoint: a folder, or a name on the hub
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import torch_mpk

TINY_MODEL = Path(__file__).parent / "tiny-qwen3-bytes"
TINY_PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
PROMPT = "The fastest way to decode a language model on two GPUs is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY_MODEL))
    parser.add_argument("--prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sample", action="store_true", help="draw tokens, the same on every rank")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        args.model, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.bfloat16
    ).eval()
    is_tiny = args.model == str(TINY_MODEL)
    if is_tiny:  # a token is a byte
        ids = torch.tensor([list((args.prompt or TINY_PROMPT).encode())])
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(args.prompt or PROMPT, return_tensors="pt").input_ids
    ids = ids.to(model.device)
    speeds: dict[str, float] = {}
    for _ in range(2):  # the first call compiles
        tokens = torch_mpk.generate(
            model, ids, args.tokens, do_sample=args.sample, eos_token_id=[], pad_token_id=0, stats=speeds
        )[0].tolist()

    everybodys: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everybodys, tokens)
    if dist.get_rank() == 0:
        assert all(each == tokens for each in everybodys), "ranks have different tokens"
        print(bytes(tokens).decode(errors="replace") if is_tiny else tokenizer.decode(tokens))
        print(f"{dist.get_world_size()} ranks: {speeds['tokens_per_second']:.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
