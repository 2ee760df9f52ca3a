"""Writes the tables and charts of README and docs from the recorded runs, or shows a run.

    python benchmarks/tables.py                                 # after a run that a page shows
    python benchmarks/tables.py decode_nvidia-h200_2026-11-28   # prints that run, as a page

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; a function below has its name.
A chart is a PNG that a page links, results/<run>.png. It carries the run's digest, and is drawn again where the run is
another; that needs matplotlib: pip install -e ".[benchmarks]".
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import records

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- table: (\w+) -->\n\n).*?(\n\n<!-- end of table -->)", re.DOTALL)
CHART = re.compile(r"benchmarks/results/([\w-]+)\.png")
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-1b": "Llama-3.2-1B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-14b": "Qwen3-14B",
    "qwen3-32b": "Qwen3-32B",
    "olmoe-1b-7b": "OLMoE-1B-7B",
}
TABLES: dict[str, Callable[[], str]] = {}


def table(function: Callable[[], str]) -> Callable[[], str]:
    TABLES[function.__name__] = function
    return function


def pages() -> dict[Path, str]:
    """The text of each page with its tables as the records have them."""
    return {page: TABLE.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], page.read_text()) for page in PAGES}


def stale_charts() -> list[str]:
    """Runs whose charts are not those of the record, among all that pages link."""
    linked = {name for page in PAGES for name in CHART.findall(page.read_text())}
    return [name for name in sorted(linked) if not _is_current(name)]


def _is_current(name: str) -> bool:
    chart = records.RESULTS / f"{name}.png"
    return chart.exists() and records.digest(records.find(name)).encode() in chart.read_bytes()


# ---- what stands in a cell ----

_find = functools.cache(records.find)


def figure(run: str, path: str, **which: object) -> float | None:
    """The number at ``path`` of the run's result for which all of ``which`` holds; none where there is none."""
    for result in _find(run)["results"]:
        if all(result.get(key) == value for key, value in which.items()) and "error" not in result:
            found = result
            for step in path.split("."):
                found = found[step]
            return float(found)
    return None


def short(number: float | None) -> str:
    """Three significant digits, and all of those in front of the point."""
    if number is None:
        return ""
    decimals = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2 if abs(number) >= 0.9995 else 3
    return f"{number:,.{decimals}f}"


def fixed(decimals: int) -> Callable[[float | None], str]:
    return lambda number: "" if number is None else f"{number:,.{decimals}f}"


def bold(cell: str) -> str:
    return f"**{cell}**" if cell else ""


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def markdown(columns: list[str], rows: Iterator[list[str]]) -> str:
    lines = [[f" {cell} " if cell else " " for cell in row] for row in (columns, *rows)]
    return "\n".join(f"|{'|'.join(line)}|" for line in [lines[0], ["---"] * len(columns), *lines[1:]])


# ---- the tables ----


@table
def steps() -> str:
    run, models = "decode_nvidia-h200_2026-11-23", ["qwen3-0.6b", "llama-1b", "qwen3-1.7b", "qwen3-8b"]

    def rows() -> Iterator[list[str]]:
        ways = {"eager": "eager, bound by the host", "reduce-overhead": '`torch.compile(mode="reduce-overhead")`'}
        for variant, name in ways.items():
            yield [name, *(short(figure(run, "step_ms.median", model=m, variant=variant)) for m in models)]
        yield ["mpk", *(bold(fixed(3)(figure(run, "step_ms.median", model=m, variant="mpk"))) for m in models)]
        shares = (percent(figure(run, "of_ceiling", model=m, variant="mpk")) for m in models)
        yield ["mpk, share of the streaming ceiling", *shares]
        launches = (
            ", ".join(f"{figure(run, 'launches', model=m, variant=v):.0f}" for v in (*ways, "mpk")) for m in models
        )
        yield ["launches per step: eager, reduce-overhead, mpk", *launches]

    return markdown(["ms per step", *(MODELS[m] for m in models)], rows())


BATCHES = "decode_nvidia-h200_2026-11-28"
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64]
BATCH_MODELS = ["qwen3-0.6b", "llama-1b", "qwen3-8b"]


@table
def batches() -> str:
    def rows() -> Iterator[list[str]]:
        for model in BATCH_MODELS:
            for variant in ("graph", "reduce-overhead", "mpk"):
                numbers = [
                    figure(BATCHES, "step_ms.median", model=model, batch=b, variant=variant) for b in BATCH_SIZES
                ]
                cells = [bold(fixed(2)(n)) if variant == "mpk" else short(n) for n in numbers]
                if any(cells):
                    yield [f"{MODELS[model]}, {variant}", *cells]

    return markdown(["ms per step, batch", *map(str, BATCH_SIZES)], rows())


@table
def batches_and_reading() -> str:
    def of(model: str, batch: int, path: str) -> float:
        return figure(BATCHES, path, model=model, batch=batch, variant="mpk") or 0.0

    def rows() -> Iterator[list[str]]:
        for model in BATCH_MODELS:
            yield [MODELS[model], *(fixed(3)(of(model, batch, "step_ms.median")) for batch in BATCH_SIZES)]
        for model in BATCH_MODELS:
            floors = (of(model, batch, "of_ceiling") * of(model, batch, "step_ms.median") for batch in BATCH_SIZES)
            yield [f"{MODELS[model]}, reading", *map(fixed(2), floors)]

    return markdown(["", *map(str, BATCH_SIZES)], rows())


@table
def experts() -> str:
    run, batch_sizes = "decode_nvidia-h200_2026-11-28_experts-runs", [1, 8, 32]
    before = run.removesuffix("-runs")

    def rows() -> Iterator[list[str]]:
        yield ["ms a step", *(bold(fixed(3)(figure(run, "step_ms.median", batch=b))) for b in batch_sizes)]
        yield ["before runs", *(fixed(3)(figure(before, "step_ms.median", batch=b)) for b in batch_sizes)]
        yield ["share", *(percent(figure(run, "of_ceiling", batch=b)) for b in batch_sizes)]

    return markdown(["rows", *map(str, batch_sizes)], rows())


@table
def ranks() -> str:
    """Where a case was measured in both runs, the one without other commands' steps is shown."""
    run, batch_sizes = "decode_nvidia-h200_2026-11-29_ranks", [1, 8, 32]
    long = [f"decode_nvidia-h200_2026-11-30_ranks-{name}" for name in ("long", "4096")]

    def cell(model: str, batch: int, num_ranks: int, variant: str = "mpk", position: int = 512) -> str:
        which = {"model": model, "batch": batch, "position": position, "ranks": num_ranks, "variant": variant}
        found = (figure(name, "step_ms.median", **which) for name in (run, f"{run}-beside", *long))
        return short(next((number for number in found if number is not None), None))

    def rows() -> Iterator[list[str]]:
        for model in ("llama-1b", "qwen3-8b", "qwen3-14b", "qwen3-32b"):
            if any(alone := [cell(model, batch, 1) for batch in batch_sizes]):
                yield [f"{MODELS[model]}, one GPU", *alone]
            for variant in ("eager", "reduce-overhead"):
                if other := cell(model, 1, 2, variant):
                    yield [f"{MODELS[model]}, two GPUs, {variant}", other, "", ""]
            yield [f"{MODELS[model]}, two GPUs, mpk", *(bold(cell(model, batch, 2)) for batch in batch_sizes)]
        for model in ("llama-1b", "qwen3-8b", "qwen3-14b", "qwen3-32b"):
            cells = (bold(number) if (number := cell(model, batch, 2, position=4096)) else "" for batch in batch_sizes)
            yield [f"{MODELS[model]} at position 4,096, two GPUs, mpk", *cells]

    return markdown(["ms a step, rows", *map(str, batch_sizes)], rows())


TOKENS = [128, 512, 2048]
WAYS = {"graph": ", graph", "inductor": ", Inductor", "mpk": ""}
H100, H200 = "prefill_nvidia-h100-80gb-hbm3", "prefill_nvidia-h200"


def _prompt(runs: list[str], model: str, variant: str, tokens: int) -> float | None:
    """The figure of the first run that has it."""
    found = (figure(run, "prefill_ms.median", model=model, variant=variant, tokens=tokens) for run in runs)
    return next((number for number in found if number is not None), None)


@table
def prompts() -> str:
    def rows() -> Iterator[list[str]]:
        for model in ("qwen3-0.6b", "qwen3-8b"):
            for variant, name in WAYS.items():
                cells = []
                for tokens in TOKENS:
                    is_h200 = model == "qwen3-8b" and tokens == 2048
                    cell = short(_prompt([f"{H200 if is_h200 else H100}_2026-11-28"], model, variant, tokens))
                    cells.append((bold(cell) if variant == "mpk" else cell) + " (H200)" * is_h200)
                yield [MODELS[model] + (name or ", mpk"), *cells]

    return markdown(["ms, tokens", *(f"{tokens:,}" for tokens in TOKENS)], rows())


@table
def prompts_of_both() -> str:
    runs = {"H100": [f"{H100}_2026-11-28", f"{H100}_2026-11-27"], "H200": [f"{H200}_2026-11-28", f"{H200}_2026-11-26"]}
    alone = {128: "5.9006 ms", 512: "14.2790 ms"}  # the kernel alone, of Qwen3-8B on an H200
    log = records.find("offline_nvidia-h200_2026-11-27_prompts")["text"]

    def rows() -> Iterator[list[str]]:
        for chip in runs:
            for model in ("qwen3-0.6b", "qwen3-8b"):
                for variant in ("mpk", "graph", "inductor"):
                    numbers = [_prompt(runs[chip], model, variant, tokens) for tokens in TOKENS]
                    if chip == "H200" and model == "qwen3-8b" and variant == "mpk":
                        assert all(f"qwen3-8b-1x{tokens}, <after>: {ms}" in log for tokens, ms in alone.items())
                        numbers[:2] = [float(ms.split()[0]) for ms in alone.values()]
                    if any(numbers):
                        yield [f"{MODELS[model]}, {chip}{WAYS[variant]}", *map(short, numbers)]

    return markdown(["tokens", *(f"{tokens:,}" for tokens in TOKENS)], rows())


@table
def steps_on_a_cpu() -> str:
    run = "cpu_decode_intel-r-xeon-r-processor_2026-11-21"
    cases = [(model, dtype) for model in ("qwen3-0.6b", "llama-1b") for dtype in ("bfloat16", "float32")]

    def of(path: str, variant: str) -> list[float]:
        return [figure(run, path, model=model, dtype=dtype, variant=variant) or 0.0 for model, dtype in cases]

    def rows() -> Iterator[list[str]]:
        ways = {"eager": "eager", "inductor": "Inductor", "inductor-freezing": "Inductor with freezing"}
        for variant, name in ways.items():
            yield [name, *map(fixed(0), of("step_ms.median", variant))]
        both = zip(of("step_ms.median", "mpk"), of("of_ceiling", "mpk"), strict=True)
        yield ["mpk", *(f"**{ms:.0f}** ({percent(share)})" for ms, share in both)]

    shown = {"bfloat16": "bf16", "float32": "fp32"}
    return markdown(["", *(f"{MODELS[model]} {shown[dtype]}" for model, dtype in cases)], rows())


@table
def rows_on_a_cpu() -> str:
    batch, tokens = (f"cpu_decode_amd-epyc_2026-11-23_{label}" for label in ("batch", "tokens"))
    columns = [(batch, {"batch": n}) for n in (1, 2, 4, 8, 16)] + [(tokens, {"tokens": n}) for n in (2, 8, 16)]

    def rows() -> Iterator[list[str]]:
        for variant, name in {"mpk": "mpk", "inductor": "Inductor", "eager": "eager"}.items():
            yield [name, *(short(figure(run, "step_ms.median", variant=variant, **which)) for run, which in columns)]

    return markdown(["", "batch 1", "2", "4", "8", "16", "2 tokens of one sequence", "8", "16"], rows())


@table
def serving() -> str:
    run, with_inductor = "serving_nvidia-h200_2026-11-27", "serving_nvidia-h200_2026-11-26"
    ways = {
        "sdpa, CUDA graphs": "{}, the engine's own steps",
        "sdpa, Inductor and CUDA graphs": "the same, through Inductor",
        "mpk, CUDA graphs": "mpk",
    }

    def rows() -> Iterator[list[str]]:
        for rate, load in {0: "{}, 32 requests at once", 10: "10 a second: {}"}.items():
            for model in ("qwen3-0.6b", "qwen3-8b"):
                for variant, name in ways.items():
                    which = {"model": model, "variant": variant, "rate": rate}
                    source = run if figure(run, "tokens_per_s", **which) else with_inductor
                    speed = fixed(0)(figure(source, "tokens_per_s", **which))
                    mine = variant.startswith("mpk")
                    cell = speed + ", all that came" if mine and rate else bold(speed) if mine else speed
                    times = (
                        ", ".join(short(figure(source, f"{token}.{p}", **which)) for p in ("p50", "p99"))
                        for token in ("first_ms", "next_ms")
                    )
                    busy = "" if rate else percent(figure(source, "busy", **which))
                    yield [name.format(load.format(MODELS[model])), cell, *times, busy]

    columns = ["", "tokens/s", "first token, ms: p50, p99", "next token, ms: p50, p99", "GPU busy"]
    return markdown(columns, rows())


@table
def attention_over_pages() -> str:
    run, numbers = "serving_nvidia-h200_2026-11-27_attention", [1, 8, 32, 64]
    ways = {
        "mpk": "pages",
        "mpk, static caches": "static caches",
        "sdpa, static caches": "`scaled_dot_product_attention`, static caches",
        "varlen_attn, no pages": "`varlen_attn`, keys side by side",
    }

    def rows() -> Iterator[list[str]]:
        for variant, name in ways.items():
            cases = (f"qwen3-0.6b, attention of {n} rows of 128 to 1280" for n in numbers)
            yield [name, *(short(figure(run, f"times.{variant}.us", case=case)) for case in cases)]

    return markdown(["rows", *map(str, numbers)], rows())


@table
def tested() -> str:
    """Versions that ran together, by the environments of all runs that name them."""
    environments = [
        run["environment"] for file in sorted(records.RESULTS.glob("*.jsonl")) for run in records.runs(file)
    ]
    together: dict[tuple[str, ...], list[str]] = {}
    for e in environments:
        if "torch" in e:
            cuda = re.sub(r".*cuda_(\d+\.\d+).*", r"\1", e["nvcc"])
            versions = (e["device"], e["python"], e["torch"], e["transformers"], cuda, e["driver"])
            together.setdefault(versions, []).append(e["date"])
    rows = ([*versions, str(len(dates)), max(dates)] for versions, dates in sorted(together.items()))
    return markdown(["device", "Python", "torch", "transformers", "nvcc", "driver", "runs", "last"], rows)


def main() -> None:
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(records.as_text(records.find(name)))
        return
    for page, text in pages().items():
        page.write_text(text)
    for name in stale_charts():
        from chart import draw_run

        draw_run(records.find(name), records.RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
