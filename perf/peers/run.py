"""The comparison: build missing environments, visit all servers in turn, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from perf.peers import comparison, plots
from perf.peers.catalogue import BARE, PEERS, Launch, Peer, python_of
from perf.peers.comparison import Contender
from perf.peers.environments import ENVIRONMENTS, BuildFailed, build, version_of
from perf.peers.inputs import IMAGES, SCENARIOS, TEXTS, Answers, Disagreement, Inputs, Scenario
from perf.peers.kept import ROUNDS, KeptRounds
from perf.peers.visits import Plan, Visit, started, visit, visit_bare
from perf.tools import report
from perf.tools.jpegs import clip_folder
from perf.tools.servers import ROOT, Card, Options, ServerFailed, serving
from perf.tools.texts import TextSource
from staged_pool.runtime.config import DType

FULL: Final[Mapping[Scenario, tuple[int, ...]]] = {
    "s1": (1, 16, 64), "m8": (1, 4, 16, 64), "x64": (1, 4, 16), "rank": (1, 4), "images": (1, 8), "photos": (1, 8),
    "captions": (8,),
}  # fmt: skip
QUICK: Final[Mapping[Scenario, tuple[int, ...]]] = {
    "s1": (16,), "m8": (8,), "x64": (2,), "rank": (1,), "images": (4,), "photos": (4,), "captions": (4,),
}  # fmt: skip
QUICK_SECONDS: Final = 2.0
LEVEL_SECONDS: Final = 20.0

NOTE: Final = (
    "Medians of the rounds, and in brackets the least and the most of a round. *Of ours*: of what staged-pool did in "
    "the same round. Every server was started anew in each round while no other ran, and its vectors agreed with ours "
    "before it was timed. A p99 of fewer than 100 samples is the largest of them."
)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Served model, with its inputs and the right answers."""

    inputs: Inputs
    answers: Answers
    """Answers of our server in float32."""
    scenarios: tuple[Scenario, ...]
    launch: Callable[[Peer, DType], Launch]
    """Returns the parameters of the start of a server."""


Entry = tuple[Peer, DType]
"""A server, and the dtype of its weights."""


def run(
    model: str | None,
    *,
    peers: Sequence[Peer],
    rounds: int,
    seconds: float,
    levels: Sequence[float],
    scenarios: Collection[Scenario],
    quick: bool,
    go_on: bool = False,
    float32: bool = True,
    neighbour: bool = False,
) -> None:
    """Measure, print and record.

    The order alternates between rounds. A server that cannot be built, does not start, or gives wrong answers is named
    with the reason, and the others go on.

    Args:
        model: Folder of the text model. None: MiniLM.
        peers: The servers; ours is among them.
        rounds: Rounds to measure now; 0 is allowed if there are stored ones.
        seconds: Length of one cell.
        levels: Rates of the open loop, as multiples of a server's best closed-loop rate.
        scenarios: Scenarios to measure.
        quick: Run one short round, as a check.
        go_on: Include the rounds that were measured before.
        float32: Compare all in float32, too, if bfloat16 is their best.
        neighbour: Run a busy loop on each core during each measurement; rounds and results are stored separately.

    Raises:
        OtherSettings: Rounds that were measured before have other settings.
    """
    if quick:
        rounds = 1
    plan = _plan(seconds, levels, scenarios, quick=quick, neighbour=neighbour)
    name = "peers-neighbour" if neighbour else "peers"
    settings: dict[str, object] = {
        "model": model, "peers": [peer.name for peer in peers], "rounds": rounds, "quick": quick, "plan": asdict(plan),
        "scenarios": SCENARIOS,
    }  # fmt: skip
    with report.recording(name, settings) as record, ExitStack() as running:
        missing, versions = build_all([*peers, BARE])
        built = [peer for peer in (*peers, BARE) if peer.name in versions]
        with serving(Options(model=model).serve_command()) as server:
            card = server.card()
        models = _models(model, scenarios, card, running)
        wanted = comparisons(card.dtype, float32=float32)
        entries = list(dict.fromkeys((peer, peer.dtype(dtype)) for dtype in wanted.values() for peer in built))
        folder = ROUNDS / (("quick" if quick else "full") + ("-neighbour" if neighbour else ""))
        kept = KeptRounds(_settings(settings, versions, card), folder=folder)
        if not go_on:
            kept.clear()
        visits = _rounds(entries, models, plan, rounds=rounds, kept=kept, failed=missing)
        record.results["commits"] = [each.commit for each in kept.load()]
        contenders = {
            entry: Contender(entry[0], entry[1], versions[entry[0].name], seen) for entry, seen in visits.items()
        }
        record.results |= {
            "model": card,
            "contenders": [contender.result() for contender in contenders.values()],
            "not_measured": missing,
        }
        compared = {title: [contenders[peer, peer.dtype(dtype)] for peer in built] for title, dtype in wanted.items()}
        _report(name, compared, plan, missing)


def _plan(
    seconds: float, levels: Sequence[float], scenarios: Collection[Scenario], *, quick: bool, neighbour: bool
) -> Plan:
    """Return the measurements of each visit; see `run`."""
    return Plan(
        seconds=min(seconds, QUICK_SECONDS) if quick else seconds,
        level_seconds=QUICK_SECONDS if quick else LEVEL_SECONDS,
        clients={name: each if name in scenarios else () for name, each in (QUICK if quick else FULL).items()},
        levels=(2.0,) if quick else tuple(levels),
        neighbour=neighbour,
    )


def _models(model: str | None, scenarios: Collection[Scenario], card: Card, running: ExitStack) -> list[Model]:
    """Return the models that the scenarios need; their folders last as long as `running`."""
    models = []
    if texts := tuple(name for name in TEXTS if name in scenarios):
        models.append(_model(Inputs.texts(TextSource(model)), texts, card))
    if images := tuple(name for name in IMAGES if name in scenarios):
        models.append(_model(Inputs.images(running.enter_context(clip_folder())), images, card))
    return models


def comparisons(dtype: str, *, float32: bool) -> Mapping[str, DType]:
    """Return the data type of each comparison, by its title.

    Args:
        dtype: Data type that our server selects on this machine.
        float32: Compare in float32, too, if it is another one.
    """
    all_in_float32: dict[str, DType] = {"All in float32": "float32"}
    if dtype == "float32":
        return all_in_float32
    best: dict[str, DType] = {"Each at its best": "bfloat16"}
    return best | all_in_float32 if float32 else best


def build_all(peers: Sequence[Peer], make: Callable[[str], Path] = build) -> tuple[dict[str, str], dict[str, str]]:
    """Build the environments; return the reasons of failures, and the versions of the others, by name.

    Args:
        peers: The servers.
        make: Returns the interpreter of an environment by its name.
    """
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    with report.progress("environments", len(peers)) as bar:
        for peer in peers:
            bar.update(bar.task_ids[0], description=f"environment: {peer.name}")
            try:
                python = Path(sys.executable) if peer.environment is None else make(peer.environment)
                versions[peer.name] = version_of(python, peer.package)
            except BuildFailed as failure:
                failed[peer.name] = f"cannot be built here: {failure}"
            bar.advance(bar.task_ids[0])
    return failed, versions


def _model(inputs: Inputs, scenarios: tuple[Scenario, ...], card: Card) -> Model:
    def launch(peer: Peer, dtype: DType) -> Launch:
        return Launch(
            python=python_of(peer, ENVIRONMENTS),
            folder=inputs.folder,
            dtype=dtype,
            torch_threads=card.torch_threads,
            max_tokens=card.max_tokens,
            scratch=ENVIRONMENTS / "scratch",
        )

    ours = PEERS[0]
    with started(ours, launch(ours, "float32")) as server:
        return Model(inputs, inputs.answers(server, ours.dialect), scenarios, launch)


def _settings(settings: Mapping[str, object], versions: Mapping[str, str], card: Card) -> dict[str, str]:
    """Return the settings that must be the same in all rounds; our own commit may differ."""
    facts = report.machine_facts()
    return {
        **{name: repr(settings[name]) for name in ("model", "plan")},
        **{name: repr(facts[name]) for name in ("cpu", "cores", "python")},
        "versions": repr(versions),
        "dtype": card.dtype,
        "torch_threads": str(card.torch_threads),
    }


def _rounds(
    entries: Sequence[Entry],
    models: Sequence[Model],
    plan: Plan,
    *,
    rounds: int,
    kept: KeptRounds,
    failed: dict[str, str],
) -> dict[Entry, list[Visit | None]]:
    """Visit all servers in every round, without those that failed with a model before; Ctrl-C ends it early.

    Args:
        entries: Servers with the data types of their weights.
        models: The models.
        plan: Measurements of a visit.
        rounds: Rounds to measure now.
        kept: Stored rounds, which come first; completed rounds are added.
        failed: Reasons of failures by server, data type and scenarios; it is extended.
    """
    visits: dict[Entry, list[Visit | None]] = {entry: [] for entry in entries}
    for earlier in kept.load():
        seen = {(name, dtype): each for name, dtype, each in earlier.visits}
        for entry in entries:
            visits[entry].append(seen.get((entry[0].name, entry[1])))
    first = len(visits[entries[0]])
    steps = {
        (entry, model): plan.steps(entry[0], model.scenarios, model.inputs) for entry in entries for model in models
    }
    with report.progress("peers", rounds * sum(steps.values())) as bar, suppress(KeyboardInterrupt):
        task = bar.task_ids[0]
        for round_number in range(first, first + rounds):
            for entry in entries[:: -1 if round_number % 2 else 1]:
                parts = []
                for model in models:
                    name = f"{entry[0].name} ({entry[1]}), {', '.join(model.scenarios)}"
                    bar.update(task, description=f"round {round_number + 1}: {name}")
                    before = bar.tasks[0].completed
                    if steps[entry, model] and name not in failed:
                        try:
                            parts.append(_visit(entry, model, plan, round_number, partial(bar.advance, task)))
                        except (ServerFailed, Disagreement) as failure:
                            failed[name] = str(failure).replace(str(ROOT), ".")
                        report.console.print(
                            f"round {round_number + 1}: {name}: {failed.get(name, 'measured')}", markup=False
                        )
                    bar.update(task, completed=before + steps[entry, model])
                visits[entry].append(_joined(parts))
            commit = str(report.machine_facts()["commit"])
            kept.add(commit, [(peer.name, dtype, visits[peer, dtype][-1]) for peer, dtype in entries])
    done = max(map(len, visits.values()))
    return {entry: [*seen, *[None] * (done - len(seen))] for entry, seen in visits.items()}


def _visit(entry: Entry, model: Model, plan: Plan, round_number: int, done: Callable[[], None]) -> Visit:
    if entry[0] is BARE:
        return visit_bare(model.launch(*entry), model.inputs, model.scenarios, plan=plan)
    return visit(
        entry[0],
        model.launch(*entry),
        model.inputs,
        model.scenarios,
        plan=plan,
        ours=model.answers,
        seed=round_number,
        done=done,
    )


def _joined(parts: Sequence[Visit]) -> Visit | None:
    """Merge the visits of a server with texts and images; start time and memory are those of the first."""
    if not parts:
        return None
    first, *others = parts
    for other in others:
        first.cells |= other.cells
        first.mixed |= other.mixed
        first.failures |= other.failures
        first.least_cosine = min(first.least_cosine, other.least_cosine)
    return first


def titled(title: str, *, neighbour: bool) -> str:
    """Return the title of a comparison, which mentions the busy loops."""
    return f"{title}, with a busy loop on each core" if neighbour else title


def _report(name: str, compared: Mapping[str, Sequence[Contender]], plan: Plan, failed: Mapping[str, str]) -> None:
    """Print all tables; write them to `results/<name>.md`, and an image for each comparison."""
    parts = [f"# {titled('staged-pool beside other servers', neighbour=plan.neighbour)}\n\n{NOTE}\n"]
    troubles = [f"{name}: {why}" for name, why in failed.items()]
    for comparison_of, contenders in compared.items():
        image = report.RESULTS / f"{name}-{comparison_of.split()[-1]}.svg"
        title = titled(comparison_of, neighbour=plan.neighbour)
        plots.plot(contenders, plan.clients, title, image)
        parts.append(f"## {title}\n\n![{title}]({image.name})\n")
        for table in comparison.tables(contenders, plan.clients, title):
            table.show()
            parts.append(table.markdown())
        troubles += [line for contender in contenders for line in comparison.failures(contender)]
    settings = {contender.peer.name: contender.peer.settings for each in compared.values() for contender in each}
    parts.append("## Settings\n\n" + "".join(f"- {name}: {text}.\n" for name, text in settings.items()))
    if troubles:
        listed = "".join(f"- {line.replace(chr(10), ' ')}\n" for line in dict.fromkeys(troubles))
        parts.append(f"## Not measured\n\n{listed}")
    facts = "".join(f"- {name}: {value}\n" for name, value in report.machine_facts().items() if name != "changed_files")
    parts.append(f"## Machine\n\n{facts}")
    (report.RESULTS / f"{name}.md").write_text("\n".join(parts))
