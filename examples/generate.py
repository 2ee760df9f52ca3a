"""Stream a continuation through torch.compile(model, backend="mpk"), then compare its speed and its tokens with eager.

python examples/generate.py                          # the small byte-level model that ships beside this file
python examples/generate.py --config qwen3-0.6b      # a full-size model with random weights
python examples/generate.py --model Qwen/Qwen3-0.6B  # a real checkpoint: a folder, or a name on the hub
"""

import argparse
import functools
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_mpk
from torch_mpk.testing.decode import count_launches, prefill
from torch_mpk.testing.models import CONFIGS, random_model

TINY_MODEL = Path(__file__).parent / "tiny-qwen3-bytes"
TINY_PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
PROMPT = "The fastest way to decode a language model on one GPU is"
NUM_WARMUP_TOKENS = 4  # from the prefill and the first steps, which build, load and warm up


class ByteText:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class TokenNumbers(ByteText):
    """Random weights say nothing readable: show the numbers."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)


class TokenizerText:
    """A checkpoint's own tokenizer."""

    def __init__(self, checkpoint: str):
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Progress:
    """Prints "label 3 s" on stderr once a second until told to stop."""

    def __init__(self, label: str):
        self.label = label
        self.begin = time.perf_counter()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._show, daemon=True)
        self.thread.start()

    def _show(self) -> None:
        while not self.stopped.wait(1.0):
            seconds = time.perf_counter() - self.begin
            print(f"\r{self.label} {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Leaves the final time on a line of its own; does nothing the second time."""
        if not self.stopped.is_set():
            self.stopped.set()
            self.thread.join()
            print(f"\r{self.label} {time.perf_counter() - self.begin:.1f} s", file=sys.stderr, flush=True)


class Stream:
    """The tokens of one run as they come: when each one came and, piece by piece, what they say."""

    def __init__(self, text: ByteText | TokenizerText):
        self.text = text
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.printed = ""

    def put(self, tokens: Tensor) -> None:
        """As a streamer, which gets the prompt first: only that has two dimensions."""
        if tokens.dim() == 1:
            self.record(tokens)

    def record(self, token: Tensor) -> None:
        self.tokens.append(int(token))
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def show(self) -> None:
        """Prints what has been recorded since the last time."""
        text = self.text.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character may still come
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def gaps_ms(self) -> list[float]:
        """Between tokens, once warm."""
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.times[NUM_WARMUP_TOKENS - 1 :])]


class ShownStream(Stream):
    """Prints what comes, and until then how long compiling takes."""

    def __init__(self, text: ByteText | TokenizerText, prompt: str):
        super().__init__(text)
        self.prompt = prompt
        self.compiling = Progress("compiling the decode step:")

    def record(self, token: Tensor) -> None:
        super().record(token)
        if len(self.tokens) == 1:
            return  # it comes from the prefill; building starts now
        if len(self.tokens) == 2:
            self.compiling.stop()
            print(self.prompt, end="")
        self.show()

    def end(self) -> None:
        print(flush=True)


@contextmanager
def timed(label: str) -> Iterator[Progress]:
    progress = Progress(label)
    try:
        yield progress
    finally:
        progress.stop()


@torch.inference_mode()
def generate_eager(model: PreTrainedModel, input_ids: Tensor, num_tokens: int, stream: Stream) -> list[float]:
    """Greedy decoding with the plain model. Returns each step's gap between the best two logits."""
    cache, logits = prefill(model, input_ids, input_ids.shape[1] + num_tokens)
    gaps = []
    while True:
        best = logits.float().topk(2)
        gaps.append((best.values[0, 0] - best.values[0, 1]).item())
        token = best.indices[:, :1]
        stream.record(token)
        if len(stream.tokens) == num_tokens:
            return gaps
        logits = model(input_ids=token, past_key_values=cache).logits[:, -1]


@torch.inference_mode()
def launches_per_step(model: PreTrainedModel, step: Callable, input_ids: Tensor) -> str:
    if model.device.type != "cuda":
        return "-"
    cache, logits = prefill(model, input_ids, input_ids.shape[1] + NUM_WARMUP_TOKENS + 1)
    token = logits.argmax(-1, keepdim=True)
    for _ in range(NUM_WARMUP_TOKENS):
        step(input_ids=token, past_key_values=cache)
    return str(count_launches(lambda: step(input_ids=token, past_key_values=cache)))


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, ByteText | TokenizerText, str, str]:
    """The model, how it reads text, its name and a prompt that suits it."""
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    if args.config:
        model = random_model(CONFIGS[args.config](), args.device, torch.bfloat16 if dtype == "auto" else dtype)
        return model, TokenNumbers(), f"{args.config}, random weights", PROMPT
    checkpoint = args.model or str(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(args.device).eval()
    is_bytes = model.config.vocab_size == 256
    text = ByteText() if is_bytes else TokenizerText(checkpoint)
    return model, text, Path(checkpoint).name, TINY_PROMPT if is_bytes else PROMPT


def in_turns(runs: Sequence[Callable[[Stream], object]], turns: int, text: ByteText | TokenizerText) -> list[float]:
    """The ms that each run takes for a token: medians, and of runs in turns, so that other load on the machine neither
    counts nor favours one of them."""
    gaps: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for run, of_run in zip(runs, gaps, strict=True):
            stream = Stream(text)
            run(stream)
            of_run += stream.gaps_ms()
    return [statistics.median(of_run or [float("nan")]) for of_run in gaps]


def report(
    name: str,
    model: PreTrainedModel,
    ms: Sequence[float],
    ours: Stream,
    eager: Stream,
    gaps: list[float],
    input_ids: Tensor,
) -> None:
    """``ms`` a token takes eager and us, or nothing; ``gaps`` are eager's between its best two logits."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    print(f"\n{name}, {str(model.dtype).removeprefix('torch.')}, on {device}")
    if ms:
        rows = [
            ("eager", ms[0], launches_per_step(model, model, input_ids)),
            ("mpk", ms[1], launches_per_step(model, torch.compile(model, backend="mpk"), input_ids)),
        ]
        print(f"\n{'':8}{'tokens/s':>12}{'ms/token':>12}{'launches/step':>16}")
        for label, each, launches in rows:
            print(f"{label:8}{1e3 / each:12.1f}{each:12.3f}{launches:>16}")
    differing = [i for i, (a, b) in enumerate(zip(ours.tokens, eager.tokens, strict=False)) if a != b]
    if differing:
        first = differing[0]
        print(f"\ntokens agree: the first {first} of {len(eager.tokens)}", end="; ")
        print(f"where they part, eager's best two logits are {gaps[first]:.2g} apart")
    else:
        print(f"\ntokens agree: all {len(ours.tokens)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a checkpoint: a folder, or a name on the hub")
    source.add_argument("--config", choices=sorted(CONFIGS), help="a full-size model with random weights")
    parser.add_argument("--prompt")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="at least 2")
    parser.add_argument("--turns", type=int, default=5, help="of eager and ours, whose medians are compared, or 0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    with timed("loading the model:"):
        model, text, name, default_prompt = load(args)
    prompt = args.prompt or default_prompt
    input_ids = torch.tensor([text.encode(prompt)], device=args.device)

    end = [] if args.config else None  # random weights end by accident
    generate = functools.partial(
        torch_mpk.generate, model, input_ids, args.max_new_tokens, do_sample=False, eos_token_id=end
    )
    ours = ShownStream(text, prompt)
    try:
        generate(streamer=ours)
    finally:
        ours.compiling.stop()

    eager = Stream(text)
    with timed("the same with eager, then both in turns:"):
        gaps = generate_eager(model, input_ids, len(ours.tokens), eager)
        run_eager = functools.partial(generate_eager, model, input_ids, len(ours.tokens))
        runs = [run_eager, lambda stream: generate(streamer=stream)]
        ms = in_turns(runs, args.turns, text) if args.turns else []
    report(name, model, ms, ours, eager, gaps, input_ids)


if __name__ == "__main__":
    main()
