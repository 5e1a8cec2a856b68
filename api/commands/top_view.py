"""The view of `top`: one event of the live feed as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from staged_pool.api.live.durations import span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from staged_pool.api.live.feed import LiveEvent, LiveModel
    from staged_pool.api.live.view import StageView

_STYLES: Final = {"calm": "green", "busy": "bold yellow", "lost": "bold red", "off": "dim"}

_SHOWN: Final = {"batch": "device", "batch_images": "device, images", "preprocess_images": "preprocess, images"}
"""Names of stages, where they differ from those in metrics."""

HELD: Final = 0.3
"""Blocked part of a stage's time from which on it is dimmed: it only waits for the stage behind."""


def render(event: LiveEvent, url: str, model: str | None = None) -> RenderableType:
    """Return the view of one event.

    Args:
        event: The event.
        url: Address of the server.
        model: Name of the model to show. None: all.
    """
    state = event.state or "serving"
    head = Text.assemble(("staged-pool", "bold"), f"  {url}  ", (state, "red" if event.state else "green"))
    parts: list[RenderableType] = [head]
    for name, each in event.models.items():
        if model in (None, name):
            parts += [Text(), *_model(name, each)]
    if model is not None and model not in event.models:
        parts.append(Text(f"The model {model} is not served. Served: {', '.join(event.models) or 'none yet'}."))
    if event.readers is not None:
        readers = event.readers
        late = f", the event loop is up to {span(readers.late_s)} late" if readers.late_s else ""
        parts += [
            Text(),
            Text(f"{readers.connections:,} connections, {readers.unread:.1f} answers being read{late}", style="dim"),
        ]
    return Group(*parts)


def waiting_for(url: str, why: str) -> RenderableType:
    """Return the view while the server does not answer."""
    return Text(f"No answer from {url}: {why}. Trying again.", style="dim")


def _model(name: str, model: LiveModel) -> list[RenderableType]:
    view, verdict, door = model.view, model.verdict, model.view.door
    lines: list[RenderableType] = [
        Text.assemble((name, "bold"), (f"  {view.device}, {view.dtype}", "dim")),
        Text.assemble(("> ", _STYLES[verdict.kind]), (verdict.sentence, _STYLES[verdict.kind]), f" {verdict.why}"),
    ]
    if verdict.help is not None:
        lines.append(Text(f"  {verdict.help.text}: {verdict.help.setting}".rstrip(": "), style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  stage")
    for column in ("busy", "blocked", "waiting", "wait", "work", "rate"):
        table.add_column(column, justify="right")
    for stage in view.stages:
        is_hot = verdict.kind != "calm" and stage.card == verdict.at
        style = "yellow" if is_hot else "dim" if stage.blocked > HELD else ""
        table.add_row(("> " if is_hot else "  ") + _SHOWN.get(stage.name, stage.name), *_cells(stage), style=style)
    lines.append(table)
    rejected = Text(f", rejected {rate(door.rejected)}", style="red" if door.rejected else "")
    lines.append(
        Text.assemble(f"  offered {rate(door.offered)}, admitted {rate(door.admitted)}", rejected)
        + Text(f", {door.requests:,} of {door.max_requests:,} requests in flight")
    )
    latency = "no answers" if view.p50_s is None else f"p50 {span(view.p50_s)}, p99 {span(view.p99_s or 0.0)}"
    lines.append(
        Text(f"  answers {rate(view.answers)}, {latency}, {view.tokens:,.0f} tokens/s, padding {view.padding:.0%}")
    )
    return lines


def _cells(stage: StageView) -> tuple[str, ...]:
    moves = stage.rate > 0
    return (
        f"{stage.busy:.0%}",
        f"{stage.blocked:.0%}",
        f"{stage.waiting:,}",
        span(stage.wait_s) if moves or stage.waiting else "-",
        span(stage.work_s) if moves else "-",
        rate(stage.rate),
    )


def rate(value: float) -> str:
    """Return a rate with its unit, without digits that say nothing."""
    return f"{value:,.0f}/s" if value >= 10 or not value else f"{value:.1f}/s"
