"""Draws recorded decode steps: milliseconds, and the share of the ceiling that they reach; of many batches,
milliseconds over the batch.

python benchmarks/chart.py benchmarks/results/decode_nvidia-h200_2026-11-23.json

Writes a PNG beside each file. Needs matplotlib: pip install -e ".[benchmarks]".
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_batches(report: dict[str, Any], path: Path) -> None:
    """Milliseconds over the batch, a line for each variant, beside what reading at the ceiling takes."""
    results = [result for result in report["results"] if "step_ms" in result]
    panels = list(dict.fromkeys((result["model"], result["position"]) for result in results))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 4 * len(panels), 4.5), layout="constrained", squeeze=False)
    variants = list(dict.fromkeys(result["variant"] for result in results))
    for axis, (model, position) in zip(axes[0], panels, strict=True):
        of_panel = [r for r in results if (r["model"], r["position"]) == (model, position)]
        batches = sorted({result["batch"] for result in of_panel})
        for i, variant in enumerate(variants):
            points = sorted((r["batch"], r["step_ms"]["median"]) for r in of_panel if r["variant"] == variant)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=f"C{i}", label=variant)
        floors = {r["batch"]: r["of_ceiling"] * r["step_ms"]["median"] for r in of_panel if r.get("of_ceiling")}
        if floors:
            axis.plot(*zip(*sorted(floors.items()), strict=True), color="0.6", linestyle="--", label="ceiling")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(batches, batches)
        axis.set_xlabel("batch")
        axis.set_title(f"{model}, position {position}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms per step (logarithmic)")
    labels = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{report['title']}\n{report['environment']['device']}, {report['environment']['date']}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    for path in parser.parse_args().reports:
        report = json.loads(path.read_text())
        batches = {result["batch"] for result in report["results"] if "position" in result}
        drawn = path.with_suffix(".png")
        (draw_batches if len(batches) > 2 else draw)(report, drawn)
        print(drawn)


if __name__ == "__main__":
    main()
