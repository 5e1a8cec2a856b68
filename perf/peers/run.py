"""The command: build what is missing, visit everybody in turns, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, get_args

from perf import report
from perf.peers import comparison, plots
from perf.peers.catalogue import OURS, PEERS, Launch, Peer, python_of
from perf.peers.comparison import Contender, Table
from perf.peers.environments import ENVIRONMENTS, BuildFailed, build, version_of
from perf.peers.inputs import SCENARIOS, TEXTS, Answers, Disagreement, Inputs, Scenario
from perf.peers.visits import Plan, Visit, started, visit
from perf.pictures import clip_folder
from perf.servers import Card, Options, ServerFailed, serving
from perf.texts import TextSource
from staged_pool.runtime.config import DType

FULL: Final[Mapping[Scenario, tuple[int, ...]]] = {
    "s1": (1, 16, 64), "m8": (1, 16, 64), "x64": (1, 4), "rank": (1, 4), "images": (1, 8),
}  # fmt: skip
QUICK: Final[Mapping[Scenario, tuple[int, ...]]] = {
    "s1": (1, 16), "m8": (16,), "x64": (4,), "rank": (1,), "images": (8,),
}  # fmt: skip
QUICK_SECONDS: Final = 2.0

NOTE: Final = (
    "Medians of the rounds; *least* and *most* are those of a round. *Of ours*: of what staged-pool did in the same "
    "round, with the weights that the table names. Every server was started anew in each round, alone on the machine, "
    "and its vectors agreed with ours before it was timed. A p99 of fewer than 100 samples is the largest of them."
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served, what is asked of it, and what is right."""

    inputs: Inputs
    card: Card
    """Of our server with its defaults: its dtype is the best that the machine is good at."""
    answers: Answers
    """Of our server in float32."""
    scenarios: tuple[Scenario, ...]

    def launch(self, peer: Peer, dtype: DType) -> Launch:
        """What a server of it is started with."""
        return Launch(
            python=python_of(peer, ENVIRONMENTS),
            folder=self.inputs.folder,
            dtype=dtype,
            torch_threads=self.card.torch_threads,
            max_tokens=self.card.max_tokens,
            scratch=ENVIRONMENTS / "scratch",
        )


Entry = tuple[Peer, DType]
"""A server, and the dtype of its weights."""


def run(model: str | None, *, peers: Sequence[Peer], rounds: int, seconds: float, quick: bool) -> None:
    """Measure, print and record.

    Rounds alternate in their order. A server that cannot be built, does not start, or computes something else is named
    with the reason, and the others go on.
    """
    if quick:
        rounds, seconds = 1, min(seconds, QUICK_SECONDS)
    plan = Plan(seconds=seconds, clients=QUICK if quick else FULL, levels=(2.0,) if quick else (0.7, 2.0))
    settings: dict[str, object] = {
        "model": model, "peers": [peer.name for peer in peers], "rounds": rounds, "quick": quick, "plan": asdict(plan),
        "scenarios": SCENARIOS,
    }  # fmt: skip
    with report.recording("peers", settings) as record, ExitStack() as running:
        missing, versions = _build(peers)
        built = [peer for peer in peers if peer.name in versions]
        models = [_texts(model), _images(running.enter_context(clip_folder()))]
        best: DType = "float32" if models[0].card.dtype == "float32" else "bfloat16"
        wanted: dict[str, DType] = {"Each at its best": best, "All in float32": "float32"}
        entries = list(dict.fromkeys((peer, peer.dtype(dtype)) for dtype in wanted.values() for peer in built))
        visits = _rounds(entries, models, plan, rounds, missing)
        contenders = {
            entry: Contender(entry[0], entry[1], versions[entry[0].name], seen) for entry, seen in visits.items()
        }
        record.results |= {
            "models": [m.card for m in models],
            "contenders": [contender.result() for contender in contenders.values()],
            "not_measured": missing,
        }
        compared = {
            title: [contenders[peer, peer.dtype(dtype)] for peer in built]
            for title, dtype in wanted.items()
            if title == "All in float32" or best != "float32"
        }
        _report(compared, plan, missing)


def _build(peers: Sequence[Peer]) -> tuple[dict[str, str], dict[str, str]]:
    """Why some cannot be built, and the versions of the others, by name."""
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    with report.progress("environments", len(peers)) as bar:
        for peer in peers:
            bar.update(bar.task_ids[0], description=f"environment: {peer.name}")
            try:
                if peer.pins is not None:
                    build(peer.pins)
                versions[peer.name] = version_of(python_of(peer, ENVIRONMENTS), peer.package)
            except BuildFailed as failure:
                failed[peer.name] = f"cannot be built here: {failure}"
            bar.advance(bar.task_ids[0])
    return failed, versions


def _texts(model: str | None) -> Model:
    return _model(Inputs.texts(TextSource(model)), TEXTS)


def _images(folder: Path) -> Model:
    return _model(Inputs.images(folder), ("images",))


def _model(inputs: Inputs, scenarios: tuple[Scenario, ...]) -> Model:
    """Ask our own server what it is by itself, and in float32 what is right."""
    ours = PEERS[0]
    with serving(Options(model=str(inputs.folder)).serve_command()) as server:
        card = server.card()
    empty = Model(inputs, card, answers=None, scenarios=scenarios)
    with started(ours, empty.launch(ours, "float32")) as server:
        return replace(empty, answers=inputs.answers(server, ours.dialect))
