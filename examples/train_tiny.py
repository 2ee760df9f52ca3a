"""Train the small byte-level Qwen3 of ``examples/tiny-qwen3-bytes`` on the Python standard library's sources.

    python examples/train_tiny.py --minutes 3

The model is transformers' ``Qwen3ForCausalLM``; a token is a byte, and byte 0, which no source file contains, ends a
file. Writes config.json, generation_config.json and model.safetensors (bfloat16), the tokenizer with its chat template,
and heldout.txt: a sample of the files the model never saw, under the Python Software Foundation licence like everything
in the standard library.
"""

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTEXT = 512
END_OF_FILE = b"\0"
HELDOUT_TEXT_BYTES = 48 * 1024
END_OF_TEXT = "<|endoftext|>"  # the name of token 0
# Messages below each other: the model knows no roles, and goes on with the text.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte of UTF-8."""
    names = {name: byte for byte, name in bytes_to_unicode().items()}  # of bytes, as text that JSON can hold
    names = {END_OF_TEXT if byte == END_OF_FILE[0] else name: byte for name, byte in names.items()}
    tokenizer = Tokenizer(models.BPE(names, merges=[], unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONFIG.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def read_sources() -> tuple[bytes, bytes]:
    """The standard library as (training bytes, held-out bytes): whole files, every 40th one held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages"}
    files = sorted(path for path in root.rglob("*.py") if not excluded & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    kept = [text for text in texts if 0 < len(text) < 400_000 and END_OF_FILE not in text]  # larger ones are tables
    heldout = kept[::40]
    training = [text for i, text in enumerate(kept) if i % 40]
    return END_OF_FILE.join(training), END_OF_FILE.join(heldout)


def as_tokens(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def cross_entropy(model: torch.nn.Module, crops: Tensor) -> Tensor:
    """Mean nats per byte of crops[B, CONTEXT + 1]: each byte but the first, predicted from those before it."""
    crops = crops.long()
    logits = model(input_ids=crops[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), crops[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: torch.nn.Module, tokens: Tensor, num_crops: int = 256) -> float:
    """Perplexity per byte over evenly spaced crops."""
    starts = torch.linspace(0, len(tokens) - CONTEXT - 1, num_crops).long().tolist()
    crops = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    losses = [cross_entropy(model, batch).item() * len(batch) for batch in crops.split(32)]
    return math.exp(sum(losses) / num_crops)


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(
    model: Qwen3ForCausalLM,
    tokens: Tensor,
    minutes: float,
    batch: int,
    peak_lr: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """AdamW on random crops for so many minutes: a warm-up, then a cosine over the time. Returns the steps taken."""
    optimizer = optimizer_for(model)
    generator = torch.Generator().manual_seed(0)
    within = torch.arange(CONTEXT + 1)
    begin, step, reported = clock(), 0, 0.0
    while (progress := (clock() - begin) / (60 * minutes)) < 1:
        lr = peak_lr * min(1.0, (step + 1) / 100, 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = torch.randint(len(tokens) - CONTEXT, (batch, 1), generator=generator)
        crops = tokens[(starts + within).to(tokens.device)]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = cross_entropy(model, crops)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if progress >= reported:
            print(f"step {step:6d}  {progress:4.0%}  lr {lr:.1e}  loss {loss.item():.3f}", file=sys.stderr, flush=True)
            reported += 0.05
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="training time")
    parser.add_argument("--batch", type=int, default=64, help="crops per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-qwen3-bytes")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(args.device)
    training, heldout = read_sources()
    model = Qwen3ForCausalLM(CONFIG).to(device)
    print(f"{model.num_parameters():,} parameters, {len(training):,} bytes to train on, {len(heldout):,} held out")
    num_steps = train(model, as_tokens(training, device), args.minutes, args.batch, args.lr)

    model = model.to(torch.bfloat16).eval()
    trained, unseen = (perplexity(model, as_tokens(text, device)) for text in (training, heldout))
    print(f"{num_steps} steps; perplexity per byte: {trained:.3f} on training text, {unseen:.3f} on held-out text")
    model.save_pretrained(args.out)
    byte_tokenizer().save_pretrained(args.out)
    (args.out / "heldout.txt").write_bytes(heldout.replace(END_OF_FILE, b"\n")[:HELDOUT_TEXT_BYTES])


if __name__ == "__main__":
    main()
