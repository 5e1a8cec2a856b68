"""Our server beside other servers on one device: the same weights, requests and load, in one run."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perf.gpu.models import bert_folder
from perf.gpu.rivals import INFINITY, NAIVE, OURS, rivals, started
from perf.gpu.standings import Cell, Figures, Standings
from perf.peers.dialects import OPENAI
from perf.tools import report
from perf.tools.load import Load, LoadGenerator, LoadOutcome
from perf.tools.servers import prepare_libraries
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import Worker, worker
from staged_pool.runtime.config import DType
from staged_pool.runtime.models.folders.resolver import resolve

if TYPE_CHECKING:
    import torch

LOADS: Final[tuple[Shape, ...]] = ("s1", "m8", "x64")
DOCUMENTS: Final = "documents"
LENGTHS: Final = (12, 200)
"""Minimum and maximum tokens of a document."""
SAMPLE: Final = 32
"""Number of texts whose vectors are compared, of all lengths."""
PATIENCE_S: Final = 20.0
MAX_ROUNDS: Final = 5

Sizes = tuple[int, int, int, int]
"""Layers, width, heads and inner width of a BERT."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Amount of work of one run."""

    models: Mapping[str, Sizes]
    clients: tuple[int, ...]
    documents: int
    """Number of documents of one request."""
    seconds: float
    """Length of one cell; answers that are still missing at its end are waited for."""
    limit_s: float
    """Time after which no round begins; each model has the same share of it."""


FULL: Final = Scope(
    {"MiniLM": (6, 384, 12, 1536), "bge-large": (24, 1024, 16, 4096)}, (16, 64), 1000, seconds=0.75, limit_s=200.0
)
QUICK: Final = Scope({"small": (2, 64, 4, 128)}, (4,), 50, seconds=0.5, limit_s=1.0)

_KINDS: Final = {INFINITY: "Infinity", NAIVE: "naive"}


def beside(
    *,
    device: Annotated[str, typer.Option(help="Device, as for `staged-pool serve`.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Local model to take in the place of the first one, whose size is MiniLM's.")
    ] = None,
    infinity: Annotated[
        Path | None, typer.Option(help="Interpreter of an environment with infinity-emb. Default: without Infinity.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="The one model that is measured: MiniLM or bge-large.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run for less than a minute with a small model.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for gpu-beside.json.")] = report.RESULTS,
) -> None:
    """Measure our server, naive servers and Infinity with the same weights, requests and load."""
    prepare_libraries()
    scope = QUICK if quick else FULL
    if only is not None:
        if only not in scope.models:
            raise typer.BadParameter(f"{only!r} is none of the models: {', '.join(scope.models)}", param_hint="--only")
        scope = replace(scope, models={only: scope.models[only]}, limit_s=scope.limit_s / len(scope.models))
    settings = {"device": device, "model": model, "infinity": str(infinity or ""), "scope": asdict(scope)}
    with (
        TemporaryDirectory(prefix="perf-beside-") as name,
        report.recording("gpu-beside", settings, folder=results) as record,
    ):
        _Run(device, scope, infinity and infinity.absolute(), Path(name), record).measure(model)


class _Run:
    """One run with all models.

    Args:
        device: Name of the device.
        scope: Amount of work.
        infinity: Interpreter of an environment with infinity-emb.
        scratch: Folder for generated models.
        record: Record of the results.
    """

    def __init__(self, device: str, scope: Scope, infinity: Path | None, scratch: Path, record: report.Record) -> None:
        from staged_pool.runtime.models.devices.accelerators import open_devices

        self._device = open_devices(device)[0]
        self._dtype = _dtype(self._device)
        self._scope = scope
        self._infinity = infinity
        self._scratch = scratch
        self._record = record

    def measure(self, model: str | None) -> None:
        """Measure all servers with each model, and show the targets at the end."""
        began = time.perf_counter()
        folders: dict[str, Path] = {} if model is None else {model: resolve(model).folder}
        names = [*folders, *list(self._scope.models)[len(folders) :]]
        for place, name in enumerate(names):
            standings = Standings(OURS)
            try:
                folder = folders.get(name) or self._make(name)
                self._measure_model(standings, folder, began + self._scope.limit_s * (place + 1) / len(names))
            except (RuntimeError, OSError) as error:
                standings.failures[name] = str(error)
            self._record.results[name] = standings.as_json()
            standings.show(f"{name}, {self._dtype} on {self._device}; {self._loads()}")
            standings.keep_targets(self._record, name, _KINDS)
        for target in self._record.targets:
            target.show()

    def _make(self, name: str) -> Path:
        """Make the folder of a model; the tokenizer is trained once."""
        layers, width, heads, inner = self._scope.models[name]
        tokenizer = self._scratch / next(iter(self._scope.models))
        folder = bert_folder(
            self._scratch / name,
            layers=layers,
            width=width,
            heads=heads,
            inner=inner,
            device=str(self._device),
            dtype=self._dtype,
            tokenizer=tokenizer if tokenizer.exists() else None,
        )
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()  # the memory is for the servers
        return folder

    def _measure_model(self, standings: Standings, folder: Path, stop_at: float) -> None:
        source = TextSource(str(folder))
        servers = rivals(folder, self._device, self._dtype, self._infinity)
        texts = [text for request in source.lists("x64") for text in request][:SAMPLE]
        with (
            started(servers, texts, self._scratch, report.console.print) as running,
            worker(partial(_Offers, running.ports, self._requests(source))) as offer,
        ):
            standings.failures |= running.failures
            standings.cosines |= running.cosines
            attempts = _Attempts(standings, offer, list(running.ports), self._units())
            for cell in self._cells():
                attempts.warm_up(cell)
            took_s, rounds = 0.0, 0
            while rounds < MAX_ROUNDS and (not rounds or time.perf_counter() + took_s < stop_at):
                round_began = time.perf_counter()
                for cell in self._cells():
                    attempts.measure(cell, self._scope.seconds, first=rounds)
                took_s, rounds = time.perf_counter() - round_began, rounds + 1

    def _cells(self) -> list[Cell]:
        return [*(Cell(load, clients) for load in LOADS for clients in self._scope.clients), Cell(DOCUMENTS, 1)]

    def _units(self) -> dict[str, int]:
        """Return the texts of one request of each load."""
        return {"s1": 1, "m8": 8, "x64": 64, DOCUMENTS: self._scope.documents}

    def _requests(self, source: TextSource) -> dict[str, tuple[bytes, ...]]:
        """Return the requests of each load, the same for every server."""
        rng = random.Random(0)
        documents = [source.text(rng.randint(*LENGTHS), rng) for _ in range(self._scope.documents)]
        lists: dict[str, list[list[str]]] = {load: source.lists(load) for load in LOADS}
        made = {name: tuple(map(OPENAI.embed, texts)) for name, texts in lists.items()}
        return {**made, DOCUMENTS: (OPENAI.embed(documents),)}

    def _loads(self) -> str:
        shown = [f"{load}: {SHAPES[load]}" for load in LOADS]
        least, most = LENGTHS
        return "; ".join([*shown, f"{DOCUMENTS}: {self._scope.documents} texts of {least} to {most} tokens"])


@dataclass(frozen=True, slots=True)
class _Order:
    """Load for one server."""

    server: str
    requests: str
    """Name of the requests."""
    load: Load


class _Offers:
    """Load generator for all servers, in a process of its own."""

    def __init__(self, ports: Mapping[str, int], requests: Mapping[str, tuple[bytes, ...]]) -> None:
        self._ports = ports
        self._requests = requests

    def __call__(self, order: _Order) -> LoadOutcome:
        generate = LoadGenerator(self._ports[order.server], self._requests[order.requests])
        try:
            return generate(order.load)
        finally:
            generate.close()  # servers close connections that are idle between two cells


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Loads of all servers in turn; a server that fails is left out from then on, with the reason."""

    standings: Standings
    offer: Worker[_Order, LoadOutcome]
    servers: list[str]
    """Servers that have not failed."""
    units: Mapping[str, int]
    """Texts of one request of each load."""

    def warm_up(self, cell: Cell) -> None:
        """Send one request of each client."""
        load = Load(clients=cell.clients, seconds=PATIENCE_S, max_requests=cell.clients, strict=False)
        self._each(cell, self.servers, load, timed=False)

    def measure(self, cell: Cell, seconds: float, *, first: int) -> None:
        """Run one cell; `first` is the place of the server that begins, which differs by round."""
        load = Load(clients=cell.clients, seconds=seconds, patience_s=PATIENCE_S, strict=False)
        place = first % len(self.servers) if self.servers else 0
        self._each(cell, self.servers[place:] + self.servers[:place], load, timed=True)

    def _each(self, cell: Cell, servers: list[str], load: Load, *, timed: bool) -> None:
        for server in list(servers):
            try:
                outcome = self.offer(_Order(server, cell.load, load))
                figures = self.standings.figures(cell, server) if timed else Figures()
                figures.add(outcome, self.units[cell.load])
                if timed:  # at once: the command may be stopped before its tables
                    report.console.print(f"{cell}, {server}: {figures.rate:.0f} texts/s", highlight=False)
            except RuntimeError as error:
                self.standings.failures[f"{server}, {cell}"] = str(error)
                self.servers.remove(server)


def _dtype(device: torch.device) -> DType:
    """Return bfloat16 on a GPU that multiplies in it, otherwise float32."""
    from staged_pool.runtime.models.devices.accelerators import multiplies_bfloat16

    return "bfloat16" if device.type == "cuda" and multiplies_bfloat16(device) else "float32"
