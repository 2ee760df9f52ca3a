"""Draws recorded decode steps: milliseconds, and the share of the ceiling that they reach; of many batches, and of
prompts, milliseconds over the batch or the tokens.

python benchmarks/chart.py decode_nvidia-h200_2026-11-23

Writes a PNG of the run's name beside the records, which carries the run's digest; benchmarks/tables.py draws those that
pages show. Needs matplotlib: pip install -e ".[benchmarks]".
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import records

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter


def draw(report: dict[str, Any], path: Path) -> None:
    results = [result for result in report["results"] if "step_ms" in result]
    cases = list(dict.fromkeys(result["case"] for result in results))
    variants = list(dict.fromkeys(result["variant"] for result in results))
    figure, axes = plt.subplots(1, 2, figsize=(4 + 3 * len(cases), 4.5), layout="constrained")
    width = 0.84 / len(variants)
    for i, variant in enumerate(variants):
        mine = [result for result in results if result["variant"] == variant]
        places = [cases.index(result["case"]) + (i - (len(variants) - 1) / 2) * width for result in mine]
        color = "0.6" if variant in ("ceiling", "read") else f"C{i}"
        medians = [result["step_ms"]["median"] for result in mine]
        below = [result["step_ms"]["median"] - result["step_ms"]["p10"] for result in mine]
        above = [result["step_ms"]["p90"] - result["step_ms"]["median"] for result in mine]
        bars = axes[0].bar(places, medians, width, yerr=(below, above), label=variant, color=color)
        axes[0].bar_label(bars, fmt="%.3g", fontsize=7)
        with_ceiling = [(x, 100 * r["of_ceiling"]) for x, r in zip(places, mine, strict=True) if r.get("of_ceiling")]
        if with_ceiling:
            bars = axes[1].bar(*zip(*with_ceiling, strict=True), width, color=color)
            axes[1].bar_label(bars, fmt="%.0f", fontsize=7)
    for axis, label in zip(axes, ("ms per step (logarithmic)", "% of the ceiling"), strict=True):
        axis.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases])
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    figure.legend(loc="outside lower center", ncols=len(variants), frameon=False)
    figure.suptitle(f"{report['title']}\n{report['environment']['device']}, {report['environment']['date']}")
    figure.savefig(path, dpi=150, metadata={"Run": records.digest(report)})
    plt.close(figure)


def draw_lines(report: dict[str, Any], path: Path, over: str) -> None:
    """Milliseconds over the batch or the prompt's tokens, a line for each variant, beside what reading at the ceiling
    takes."""
    results = [result | {"ms": time_of(result)["median"]} for result in report["results"] if time_of(result)]
    panels = list(dict.fromkeys(panel_of(result, over) for result in results))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 4 * len(panels), 4.5), layout="constrained", squeeze=False)
    variants = list(dict.fromkeys(result["variant"] for result in results))
    for axis, panel in zip(axes[0], panels, strict=True):
        of_panel = [result for result in results if panel_of(result, over) == panel]
        places = sorted({result[over] for result in of_panel})
        for i, variant in enumerate(variants):
            points = sorted((r[over], r["ms"]) for r in of_panel if r["variant"] == variant)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=f"C{i}", label=variant)
        floors = {r[over]: r["of_ceiling"] * r["ms"] for r in of_panel if r.get("of_ceiling")}
        if floors:
            axis.plot(*zip(*sorted(floors.items()), strict=True), color="0.6", linestyle="--", label="ceiling")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(places, places)
        axis.set_xlabel(over)
        axis.set_title(panel)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms (logarithmic)")
    labels = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{report['title']}\n{report['environment']['device']}, {report['environment']['date']}")
    figure.savefig(path, dpi=150, metadata={"Run": records.digest(report)})
    plt.close(figure)


def time_of(result: dict[str, Any]) -> dict[str, float] | None:
    return result.get("step_ms") or result.get("prefill_ms")


def panel_of(result: dict[str, Any], over: str) -> str:
    rest = f"position {result['position']}" if over == "batch" else f"batch {result['batch']}"
    return f"{result['model']}, {rest}"


def draw_run(report: records.Run, path: Path) -> None:
    if any("prefill_ms" in result for result in report["results"]):
        draw_lines(report, path, "tokens")
    elif len({result["batch"] for result in report["results"] if "position" in result}) > 2:
        draw_lines(report, path, "batch")
    else:
        draw(report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    for name in parser.parse_args().runs:
        drawn = records.RESULTS / f"{name}.png"
        draw_run(records.find(name), drawn)
        print(drawn)


if __name__ == "__main__":
    main()
