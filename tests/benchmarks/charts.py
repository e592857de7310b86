"""Charts of what benchmarks found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tests.benchmarks.results import Comparison


def draw_ratios(results: Sequence[Comparison], path: Path) -> None:
    """Draw each ratio with its spread, and its bar as a black line."""
    figure = Figure(figsize=(10, 1 + 0.45 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    names = [result.name for result in results]
    ratios = [result.ratio for result in results]
    below = [result.ratio - result.spread[0] for result in results]
    above = [result.spread[1] - result.ratio for result in results]
    colors = ["tab:red" if result.met is False else "tab:blue" for result in results]
    axes.barh(names, ratios, color=colors)
    # The ratio of the medians may lie outside of the ratios of the rounds.
    errors = [[max(0.0, each) for each in side] for side in (below, above)]
    axes.errorbar(ratios, names, xerr=errors, fmt="none", ecolor="gray", capsize=3)
    for place, result in enumerate(results):
        if result.bar is not None:
            axes.plot([result.bar] * 2, [place - 0.4, place + 0.4], color="black")
    axes.invert_yaxis()
    axes.set_xlabel("ratio, ours / theirs; black: what is aimed at")
    figure.savefig(path)


def draw_curve(curve: Mapping[int, Comparison], path: Path) -> None:
    """Draw microseconds of a poll over the number of partitions, ours and a bare loop's."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in ("ours", "theirs"):
        cost = [
            statistics.median(getattr(found, name)) / partitions * 1e6
            for partitions, found in curve.items()
        ]
        axes.plot(list(curve), cost, marker="o", label="ours" if name == "ours" else "bare httpx")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("partitions")
    axes.set_ylabel("microseconds a poll, start-up included")
    axes.legend()
    figure.savefig(path)
