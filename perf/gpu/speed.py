"""Rates of models of real sizes: bare forwards, the engine, and HTTP, with the use of the device."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import anyio
import typer

from perf.gpu.speed_cells import COLUMNS, IMAGE_LOADS, NOTE, TEXT_LOADS, Cell, Load
from perf.tools import report
from perf.tools.client import post
from perf.tools.jpegs import embedding_request, jpeg
from perf.tools.servers import prepare_libraries
from perf.tools.texts import SHAPES, Shape, TextSource, embeddings_body
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload
from staged_pool.runtime.requests import DENSE_ONLY, Content, Image, TextInput
from staged_pool.stages.exception_groups import only_error

if TYPE_CHECKING:
    from perf.gpu.hosted import Generators, Hosted, Rate, Served
    from perf.gpu.large_models import LargeModel

Lists: TypeAlias = "Sequence[Sequence[Content]]"
"""Inputs of each request."""

KEPT: Final = 0.90
"""Least share of the bare rate that the server keeps under load."""
IDLE: Final = 0.10
"""Largest share of the time that the device idles under load."""

QUICK_SHARE: Final = 16
"""Clients and documents of a quick run are these times fewer."""

DOCUMENTS: Final = 1000
_DOCUMENT_TOKENS: Final = (12, 200)
_FAILURE_LETTERS: Final = 800
_IMAGES: Final = 64
_BARE_IMAGES: Final = (8, 16, 64)
"""Batches of the bare forwards of images."""


def speed(
    *,
    device: Annotated[str, typer.Option(help="Device, as for `staged-pool serve`.")] = "auto",
    only: Annotated[str | None, typer.Option(help="Names of models, with semicolons between them.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of one measurement.")] = 2.0,
    limit: Annotated[float, typer.Option(help="Seconds after which no further model begins.")] = 200.0,
    preprocess_limit: Annotated[int | None, typer.Option(help="As for `staged-pool serve`.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="Folder for profiles of missed targets, by py-spy.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute, as a check.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for gpu-speed.json.")] = report.RESULTS,
) -> None:
    """Measure bare forwards, the engine and HTTP on models of real sizes."""
    prepare_libraries()
    from transformers.utils import logging

    from perf.gpu.hosted import generators
    from perf.gpu.large_models import LARGE_MODELS, SHORT_MODELS

    known = SHORT_MODELS if quick else LARGE_MODELS
    names = [one.name for one in known] if only is None else [name.strip() for name in only.split(";")]
    if unknown := set(names) - {one.name for one in known}:
        raise typer.BadParameter(f"unknown models: {', '.join(unknown)}; known: {', '.join(one.name for one in known)}")
    logging.disable_progress_bar()  # of files that are written
    settings = {"device": device, "models": names, "seconds": seconds, "loads": SHAPES}
    with (
        report.recording("gpu-speed", settings, folder=results) as record,
        TemporaryDirectory(prefix="perf-gpu-") as folder,
        generators() as generate,
    ):
        measurement = _Measurement(
            _Scope(
                device,
                min(0.3, seconds) if quick else seconds,
                QUICK_SHARE if quick else 1,
                preprocess_limit,
                profiles,
            ),
            Path(folder),
            record,
            generate,
        )
        stop_at = time.perf_counter() + limit
        for model in known:
            if model.name in names:
                measurement.run(model, stop_at)
        measurement.show()


@dataclass(frozen=True, slots=True)
class _Scope:
    """Settings of a run."""

    device: str
    seconds: float
    """Length of one measurement."""
    fewer: int
    """Divisor of clients and documents."""
    preprocess_limit: int | None
    profiles: Path | None

    def clients(self, clients: int) -> int:
        """Return the number of clients of a load that has `clients` in a full run."""
        return max(1, clients // self.fewer)


class _Measurement:
    """Measurements of models, one after the other."""

    def __init__(self, scope: _Scope, folder: Path, record: report.Record, generate: Generators) -> None:
        from staged_pool.runtime.models.devices.accelerators import open_devices

        self._device = open_devices(scope.device)[0]
        self._scope = scope
        self._seconds = scope.seconds
        self._folder = folder
        self._record = record
        self._generate = generate
        self._cells: list[Cell] = []
        self._failures: list[str] = []

    def run(self, model: LargeModel, stop_at: float) -> None:
        """Make one model, and measure it; a failure is kept for the end."""
        if (began := time.perf_counter()) > stop_at:
            self._failures.append(f"{model.name}: not measured, because the time is over")
            return
        try:
            self._measure(model)
        except Exception as error:  # noqa: BLE001  # the other models are measured all the same
            lines = traceback.format_exception(only_error(error))
            self._failures.append(f"{model.name}: {''.join(lines)[-_FAILURE_LETTERS:]}")
        report.console.print(f"{model.name}: {time.perf_counter() - began:.1f} s")

    def show(self) -> None:
        """Print a table for each model, then targets and failures."""
        self._record.results["cells"] = [cell.result() for cell in self._cells]
        self._record.results["failures"] = self._failures
        for name in dict.fromkeys(cell.model for cell in self._cells):
            rows = [cell.row() for cell in self._cells if cell.model == name]
            report.show_table(name, COLUMNS, rows)
        report.console.print(NOTE)
        for target in self._record.targets:
            target.show()
        for failure in self._failures:
            report.console.print(failure, markup=False)

    def _measure(self, model: LargeModel) -> None:
        import torch

        from perf.gpu.hosted import Hosted

        folder = self._folder / model.name.replace(" ", "-")
        folder.mkdir()
        model.write(folder, self._device, torch.bfloat16)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        config = EngineConfig(
            model=str(folder),
            served_name=model.name,
            device=str(self._device),
            dtype="bfloat16",
            offline=True,
            coalesce=False,
            preprocess_limit=self._scope.preprocess_limit or EngineConfig().preprocess_limit,
            target_delay_s=60.0,  # nothing is rejected: rates are measured
        )
        hosted = Hosted.load(config)
        if model.reads == "images":
            self._measure_images(model.name, hosted)
        else:
            self._measure_texts(model.name, hosted, folder)

    def _measure_texts(self, name: str, hosted: Hosted, folder: Path) -> None:
        from perf.gpu.loaded import prepared

        source = TextSource(str(folder))
        shapes: tuple[Shape, ...] = ("s1", "m8", "x64")
        lists: dict[str, list[list[str]]] = {shape: source.lists(shape) for shape in shapes}
        first, last = _DOCUMENT_TOKENS
        lengths = [first + place * (last - first) // DOCUMENTS for place in range(0, DOCUMENTS, self._scope.fewer)]
        rng = random.Random(0)
        lists["documents"] = [[source.text(tokens, rng) for tokens in lengths]]
        bare = {}
        for shape in ("m8", "x64"):
            texts = [text for texts in lists[shape] for text in texts]
            payloads = prepared(hosted.model, [ModelInput(TextInput(text), DENSE_ONLY) for text in texts])
            bare[shape] = self._bare(name, shape, hosted, payloads * 4, hosted.batch_tokens)
        requests = {
            shape: tuple(post("/v1/embeddings", embeddings_body(texts)) for texts in groups)
            for shape, groups in lists.items()
        }
        for shape in ("m8", "x64"):
            self._call(name, hosted, Load(shape, 64, shape), bare, lists[shape])
        self._serve(name, hosted, TEXT_LOADS, bare=bare, requests=requests)
        if hosted.model.card.launched_ahead:
            self._without(name, hosted, bare, lists)

    def _without(self, name: str, hosted: Hosted, bare: Mapping[str, float], lists: Mapping[str, Lists]) -> None:
        """Measure the engine without what makes it quick on a GPU: recorded forwards, and launches ahead."""
        one_by_one = hosted.with_settings(ahead=False)
        self._call(name, one_by_one, Load("x64", 64, "x64", without="not ahead"), bare, lists["x64"])
        small = Load("s1", 1), Load("m8", 16, "m8")
        for load in small:
            self._call(name, hosted, load, bare, lists[load.name])
        computed = hosted.with_settings(graphs=False)
        for load in small:
            self._call(name, computed, replace(load, without="not recorded"), bare, lists[load.name])

    def _measure_images(self, name: str, hosted: Hosted) -> None:
        from perf.gpu.loaded import prepared

        images = [jpeg("vga", seed) for seed in range(_IMAGES)]
        inputs = [ModelInput(Image(image), DENSE_ONLY) for image in images]
        payloads = [payload for one in inputs for payload in prepared(hosted.model, [one])]
        bare = {}
        for count in _BARE_IMAGES:
            most = min(hosted.batch_tokens, count * payloads[0].tokens)
            bare[f"{count} images"] = self._bare(name, f"{count} images", hosted, payloads * 2, most)
        requests = {"image": tuple(embedding_request([image]) for image in images)}
        self._call(name, hosted, Load("image", 16, "16 images"), bare, [[Image(image)] for image in images])
        self._serve(name, hosted, IMAGE_LOADS, bare=bare, requests=requests)

    def _bare(self, name: str, load: str, hosted: Hosted, payloads: Sequence[Payload], most: int) -> float:
        rate = hosted.bare(payloads, self._seconds, batch_tokens=most)
        self._keep(name, f"bare {load}", 0, rate, 1.0)
        return rate.tokens_per_s

    def _serve(
        self,
        name: str,
        hosted: Hosted,
        loads: Sequence[Load],
        *,
        bare: Mapping[str, float],
        requests: Mapping[str, tuple[bytes, ...]],
    ) -> None:
        """Measure loads over HTTP."""

        async def program(served: Served) -> None:
            for load in loads:
                rate = await served.http(
                    self._generate,
                    requests[load.name],
                    clients=self._scope.clients(load.clients),
                    seconds=self._seconds,
                )
                self._keep(name, f"HTTP {load.name}, {load.clients}", load.clients, rate, bare.get(load.bare))
                if load.judged and not self._judge(f"{name}, {load.name}, {load.clients} clients", self._cells[-1]):
                    await self._profile(f"{name}-{load.name}", served, requests[load.name], load)

        hosted.serve(program)

    def _call(self, name: str, hosted: Hosted, load: Load, rates: Mapping[str, float], lists: Lists) -> None:
        """Measure one load of the engine, without HTTP."""

        async def program(served: Served) -> None:
            rate = await served.library(lists, clients=self._scope.clients(load.clients), seconds=self._seconds)
            words = f"engine {load.name}, {load.clients}{load.without and f', {load.without}'}"
            self._keep(name, words, load.clients, rate, rates.get(load.bare))

        hosted.serve(program)

    def _judge(self, words: str, cell: Cell) -> bool:
        """Hold a rate to its targets; return True if it meets them."""
        idle, targets = cell.rate.use.idle, []
        if cell.of_bare is not None:
            targets.append(self._record.keep_target(f"{words}: of bare", cell.of_bare, KEPT, "", at_least=True))
        if idle is not None:
            targets.append(self._record.keep_target(f"{words}: idle", idle, IDLE, ""))
        return all(target.met for target in targets)

    async def _profile(self, name: str, served: Served, requests: tuple[bytes, ...], load: Load) -> None:
        """Repeat a load while py-spy, if it is installed, records what holds the interpreter's lock."""
        program = shutil.which("py-spy")
        if program is None or self._scope.profiles is None:
            return
        file = self._scope.profiles / f"{name.replace(' ', '-')}.txt"
        command = [program, "record", "--gil", "--rate", "250", "--duration", "1", "--format", "raw", "--output",
                   str(file), "--pid", str(os.getpid())]  # fmt: skip
        async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            await served.http(self._generate, requests, clients=self._scope.clients(load.clients), seconds=2.5)

    def _keep(self, model: str, load: str, clients: int, rate: Rate, bare: float | None) -> None:
        of_bare = None if bare is None else 1.0 if not clients else rate.tokens_per_s / bare
        self._cells.append(Cell(model, load, clients, rate, of_bare))
        report.console.print(model, *self._cells[-1].row())  # the command may be stopped before its tables
