"""Plots of a report, as SVG files, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]

STAGES: Final = ("fetch", "parse", "preprocess", "queue", "device", "postprocess", "rest")
"""Stages in the order of the bars; those of plugins and others come before the rest."""

_COLOURS: Final = {
    "fetch": "#b07aa1", "parse": "#76b7b2", "preprocess": "#59a14f", "queue": "#e15759", "device": "#4e79a7",
    "postprocess": "#edc948", "rest": "#bab0ac",
}  # fmt: skip
_SIZE: Final = (6.4, 3.2)
_GREY: Final = "#888888"


def check_matplotlib() -> None:
    """Check that matplotlib is there.

    Raises:
        ConfigError: It is not; says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plots needs matplotlib: pip install 'staged-pool[bench]'") from None


def draw(report: Report, folder: Path) -> Sequence[Path]:
    """Draw the plots of a report into a folder, and return their files.

    Raises:
        OSError: The folder cannot be written.
    """
    import matplotlib as mpl

    levels = [level for level in report["levels"] if level["requests"]["due"]]
    swept = [level for level in levels if level["offered_rate"]]
    figures: dict[str, Figure] = {}
    with mpl.rc_context({"svg.hashsalt": "staged-pool", "svg.fonttype": "none", "font.size": 9}):
        if len(swept) > 1:
            figures["latency"] = _latency(swept, report)
            figures["goodput"] = _goodput(swept, report)
        if any(level["stages_ms"] for level in levels):
            figures["stages"] = _stages([level for level in levels if level["stages_ms"]])
        for level in levels[-1:] if report["knee"] is None else [_at_knee(levels, report)]:
            figures["timeline"] = _timeline(level)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.svg" for name in figures]
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, metadata={"Date": None, "Creator": None})
    return paths


def _figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0], _SIZE[1] if panels == 1 else 4.4), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0].tolist()
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _latency(levels: Sequence[Report], report: Report) -> Figure:
    figure, (axes,) = _figure()
    offered = [level["offered_rate"] for level in levels]
    p50 = [level["latency_ms"]["p50"] or float("nan") for level in levels]
    axes.plot(offered, p50, "o-", color="#4e79a7", markersize=3, label="p50")
    with_p99 = [level for level in levels if level["latency_ms"]["p99"]]
    if with_p99:
        p99 = [level["latency_ms"]["p99"] for level in with_p99]
        values = [each["value"] for each in p99]
        errors = [[each["value"] - each["low"] for each in p99], [each["high"] - each["value"] for each in p99]]
        places = [level["offered_rate"] for level in with_p99]
        axes.errorbar(places, values, errors, fmt="o-", color="#e15759", markersize=3, capsize=2, label="p99 (95 %)")
    if report["slo_s"] is not None:
        axes.axhline(report["slo_s"] * 1e3, color=_GREY, linestyle=":", label="limit of good answers")
    axes.set(xlabel="requests offered each second", ylabel="latency, ms", yscale="log", xlim=(0, None))
    axes.legend(frameon=False)
    return figure


def _goodput(levels: Sequence[Report], report: Report) -> Figure:
    figure, (axes,) = _figure()
    offered = [level["offered_rate"] for level in levels]
    rates = [level["rates"]["goodput"] for level in levels]
    values = [0.0 if each is None else each["value"] for each in rates]
    label = "answers" if report["slo_s"] is None else f"answers within {report['slo_s']:g} s"
    axes.plot([0, max(offered)], [0, max(offered)], color=_GREY, linestyle=":", label="offered")
    axes.plot(offered, values, "o-", color="#59a14f", markersize=3, label=label)
    rejected = [level["requests"]["rejected"] / max(level["seconds"], 1e-9) for level in levels]
    axes.plot(offered, rejected, "o-", color="#e15759", markersize=3, label="rejected (429)")
    failed = [(level["requests"]["failed"] + level["requests"]["not_sent"]) / level["seconds"] for level in levels]
    if any(failed):
        axes.plot(offered, failed, "o-", color="black", markersize=3, label="failed")
    if report["knee"] and report["knee"]["held"]:
        axes.axvline(report["knee"]["held"], color=_GREY, linewidth=0.8, label="last rate that held")
    axes.set(xlabel="requests offered each second", ylabel="requests each second", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def _stages(levels: Sequence[Report]) -> Figure:
    figure, (axes,) = _figure()
    names = {name for level in levels for name in level["stages_ms"]}
    known = [name for name in STAGES[:-1] if name in names]
    ordered = [*known, *sorted(names - {*STAGES}), "rest"]
    bottoms = [0.0] * len(levels)
    places = range(len(levels))
    for name in ordered:
        heights = [level["stages_ms"].get(name, 0.0) for level in levels]
        axes.bar(places, heights, 0.7, bottoms, color=_COLOURS.get(name, "#9c755f"), label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(places, [level["plan"].removesuffix(" requests/s") for level in levels])
    is_swept = all(level["offered_rate"] for level in levels)
    axes.set(ylabel="mean time, ms", xlabel="requests offered each second" if is_swept else "")
    axes.legend(frameon=False, ncols=2)
    return figure


def _at_knee(levels: Sequence[Report], report: Report) -> Report:
    """Return the last level that held, or else the first."""
    return next((level for level in levels if level["planned_rate"] == report["knee"]["held"]), levels[0])


def _timeline(level: Report) -> Figure:
    figure, (above, below) = _figure(2)
    rows = level["timeline"]
    seconds = [row["at_s"] for row in rows]
    for name, colour in (("p50_ms", "#4e79a7"), ("p90_ms", "#f28e2b"), ("max_ms", "#e15759")):
        values = [float("nan") if row[name] is None else row[name] for row in rows]
        above.plot(seconds, values, color=colour, linewidth=1, label=name.removesuffix("_ms"))
    above.set(ylabel="latency, ms", yscale="log", title=level["plan"])
    above.legend(frameon=False, ncols=3)
    for name, colour in (("answered", "#59a14f"), ("rejected", "#e15759"), ("failed", "black")):
        if name == "answered" or any(row[name] for row in rows):
            below.step(seconds, [row[name] for row in rows], where="mid", color=colour, linewidth=1, label=name)
    below.set(xlabel="second of the load, warm-up included", ylabel="requests", ylim=(0, None))
    below.legend(frameon=False, ncols=3)
    return figure
