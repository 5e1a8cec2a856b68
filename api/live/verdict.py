"""The verdict on a model: its state and its bottleneck in one sentence, with the evidence and what would help.

All numbers of a sentence are those of the view that is told with it, and of the same seconds. So no sentence
contradicts a number beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from staged_pool.api.live.durations import span
from staged_pool.api.live.view import ModelView, ReaderView, StageView
from staged_pool.runtime.statistics import Phase

SATURATED: Final = 0.85
"""Busy part from which on a stage can be the bottleneck: above it, waits grow faster than the load."""

STILL_SATURATED: Final = 0.7
"""Busy part down to which a stage stays the bottleneck: a sentence that flickers cannot be read."""

LONG_WAIT_S: Final = 0.02
"""Wait from which on a busy stage is the bottleneck, in seconds; less if its work is short."""

REJECTING: Final = 0.01
"""Rejected part of the offered requests from which on a model is overloaded."""

SLOW_READERS: Final = 4.0
"""Mean number of unread answers from which on readers can be the bottleneck."""

SHOWN_S: Final = 1e-6
"""Least wait that is told, in seconds: a shorter one would read as 0."""

OVERLOADED: Final = "Overloaded"

Kind = Literal["calm", "busy", "lost", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """Advice, and the setting that follows it."""

    text: str
    setting: str
    """A flag of `staged-pool serve`; empty if none helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One sentence on a model, and one of evidence."""

    kind: Kind
    """`calm`: nothing waits for long. `busy`: something is the bottleneck. `lost`: requests fail or are rejected."""
    at: str
    """Card of the stage that is the bottleneck, or `door` or `readers`; empty if none is."""
    lead: str
    """The first words of the sentence, which name the subject."""
    rest: str
    why: str
    """The evidence."""
    help: Help | None = None

    @property
    def sentence(self) -> str:
        return self.lead + self.rest


_SUBJECTS: Final = {
    "parse": "Parse",
    "preprocess": "Preprocess",
    "batch": "The device",
    "postprocess": "Postprocess",
}

_HELP: Final = {
    "parse": Help(text="Smaller requests, or more processes", setting="--api-servers 2"),
    "preprocess": Help(text="More threads, or processes if its code is Python", setting="--preprocess-limit 8"),
    "batch": Help(text="Another device, shorter inputs, or a smaller data type", setting="--dtype auto"),
    "postprocess": Help(text="Answers in base64 or float16, or more processes", setting="--api-servers 2"),
}
_HELP_IMAGES: Final = Help(text="More threads for images, or smaller images", setting="--image-preprocess-limit 4")


_REASONS: Final = {
    "requests": "the limit on requests in flight",
    "items": "the limit on inputs in flight",
    "tokens": "the limit on tokens in flight",
    "bytes": "the limit on bytes in flight",
    "part": "the share of a limit that one caller may have",
    "delay": "their predicted delay",
    "deadline": "their own deadline",
}


def judge(model: ModelView, readers: ReaderView | None, told: Verdict | None = None) -> Verdict:
    """Judge a model by its last seconds.

    Args:
        model: The model.
        readers: Answers on their way to clients. None: the process has no HTTP side.
        told: The verdict before, which holds for a while when its evidence gets weaker. None: there was none.
    """
    if (state := _state(model)) is not None:
        return state
    hot = bottleneck(model, told)
    door = model.door
    if door.rejected > (0.0 if told is not None and told.lead == OVERLOADED else REJECTING * door.offered):
        return Verdict(
            kind="lost",
            at="door" if hot is None else hot.card,
            lead=OVERLOADED,
            rest=f": {_percent(door.rejected / door.offered)} of requests were rejected.",
            why=_why_rejected(model, hot),
            help=_help(hot),
        )
    if hot is not None:
        return Verdict(
            kind="busy",
            at=hot.card,
            lead=_subject(hot),
            rest=" is the bottleneck.",
            why=f"It was busy {_percent(hot.busy)} of {_window(model)}, and {_noun(hot)} waited {span(hot.wait_s)}.",
            help=_help(hot),
        )
    return _fetching(model) or _reading(model, readers) or _calm(model)


def bottleneck(model: ModelView, told: Verdict | None = None) -> StageView | None:
    """Return the last stage that is saturated; None if none is. Stages before it only wait for it."""
    was_at = "" if told is None or told.kind not in ("busy", "lost") else told.at
    return next((stage for stage in reversed(model.stages) if _is_saturated(stage, was_at)), None)


def _is_saturated(stage: StageView, was_at: str) -> bool:
    least = STILL_SATURATED if stage.card == was_at else SATURATED
    return stage.busy > least and stage.wait_s > min(LONG_WAIT_S, 2 * stage.work_s)


def _state(model: ModelView) -> Verdict | None:
    """Return the verdict on a model that does not serve, or that seems to hang."""
    if model.fault is not None:
        return Verdict(kind="lost", at="", lead="At fault", rest=f": {model.fault}.", why="Requests are rejected.")
    if model.phase == Phase.STARTING:
        return Verdict(kind="off", at="", lead="Loading", rest=".", why="Requests are taken once the model is loaded.")
    if model.phase == Phase.DRAINING:
        left = f": {_count(model.door.requests, 'request')} left."
        return Verdict(kind="off", at="", lead="Draining", rest=left, why="New requests are rejected.")
    if model.phase == Phase.STOPPED:
        return Verdict(kind="off", at="", lead="Stopped", rest=".", why="Requests are rejected.")
    if model.stall is not None:
        why = f"{model.stall[:1].upper()}{model.stall[1:]}."
        help_ = Help(text="The process ends itself if the forward does not; see `/ready`", setting="")
        return Verdict(kind="lost", at="batch", lead="The device", rest=" seems to hang.", why=why, help=help_)
    return None


def _why_rejected(model: ModelView, hot: StageView | None) -> str:
    lately = model.door.lately
    reason = max(lately, key=lambda each: lately[each])
    by = "most by" if len(lately) > 1 else "by"
    if hot is None:
        return f"That was in {_window(model)}, {by} {_REASONS[reason]}."
    busy = f"{_subject(hot)} was busy {_percent(hot.busy)} of {_window(model)}"
    return f"{busy}; requests were rejected {by} {_REASONS[reason]}."


def _fetching(model: ModelView) -> Verdict | None:
    fetch = model.limiters.get("fetch")
    if fetch is None or fetch.used < SATURATED * fetch.slots:
        return None
    return Verdict(
        kind="busy",
        at="parse",
        lead="Fetching images",
        rest=" is the bottleneck.",
        why=f"{fetch.used} of {fetch.slots} fetches run, and {fetch.waiting:,} inputs wait for one.",
        help=Help(text="More fetches at once, or images in the requests", setting=f"--media-limit {2 * fetch.slots}"),
    )


def _reading(model: ModelView, readers: ReaderView | None) -> Verdict | None:
    if readers is None or readers.unread < max(SLOW_READERS, readers.requests / 2):
        return None
    return Verdict(
        kind="busy",
        at="postprocess",
        lead="Slow readers",
        rest=" are the bottleneck.",
        why=f"{readers.unread:.0f} answers waited for their clients to read them, on average of {_window(model)}.",
        help=Help(
            text="Smaller answers, or clients that read faster; slow ones are cut off", setting="--write-timeout 10"
        ),
    )


def _calm(model: ModelView) -> Verdict:
    busiest = max(model.stages, key=lambda stage: stage.busy)
    if model.door.offered == 0 and model.door.requests == 0 and busiest.busy < REJECTING:
        return Verdict(kind="calm", at="", lead="Idle", rest=". Ready for requests.", why="Nothing is in flight.")
    return Verdict(
        kind="calm",
        at="",
        lead="Calm",
        rest=f". {_subject(busiest)} was the busiest stage, at {_percent(busiest.busy)}.",
        why=f"{_count(model.door.requests, 'request')} in flight now. {_longest_wait(model)}",
    )


def _longest_wait(model: ModelView) -> str:
    longest = max(model.stages, key=lambda stage: stage.wait_s)
    if longest.wait_s < SHOWN_S:
        return f"Nothing waited in {_window(model)}."
    subject = _subject(longest)
    return (
        f"The longest wait in {_window(model)} was that for {subject[:1].lower()}{subject[1:]}: {span(longest.wait_s)}."
    )


def _window(model: ModelView) -> str:
    return f"the last {span(model.seconds)}"


def _percent(part: float) -> str:
    """Return a part in whole percent, as the numbers beside the sentence have it."""
    return f"{100 * part:.0f} %" if part == 0.0 or part >= 0.005 else "under 1 %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _subject(stage: StageView) -> str:
    return _SUBJECTS[stage.card] + (" (images)" if stage.name.endswith("_images") else "")


def _noun(stage: StageView) -> str:
    return "requests" if stage.card == "parse" else "items"


def _help(stage: StageView | None) -> Help | None:
    if stage is None:
        return None
    return _HELP_IMAGES if stage.name == "preprocess_images" else _HELP[stage.card]
