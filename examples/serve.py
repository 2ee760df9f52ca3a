"""Several requests at once: Hugging Face's continuous batching, with each decode step one launch (docs/serving.md).

python examples/serve.py  # the small byte-level model that ships beside this file; needs transformers 5.23
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import torch_mpk.continuous_batching as mpk_cb

MODEL = Path(__file__).parent / "tiny-qwen3-bytes"
PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def __init__(self", "for line in ", "raise ValueError("]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=mpk_cb.ATTENTION).eval().to(device)
    outputs = model.generate_batch(
        [list(prompt.encode()) for prompt in PROMPTS],  # a token is a byte
        generation_config=GenerationConfig(max_new_tokens=48, do_sample=False, eos_token_id=0),
        continuous_batching_config=mpk_cb.config(num_blocks=16, max_batch_tokens=256),
        progress_bar=False,
        warmup=False,  # which would have every number of requests built that there may be at once
    )
    for output in outputs.values():
        if output.error is not None:
            raise SystemExit(f"{output.request_id}: {output.error}")
        text = bytes(output.prompt_ids + output.generated_tokens).decode(errors="replace")
        print(f"--- {output.request_id}: {len(output.generated_tokens)} tokens\n{text}")


if __name__ == "__main__":
    main()
