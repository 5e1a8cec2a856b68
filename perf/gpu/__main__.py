"""All checks and timings of one device: results against the CPU, forwards, copies and HTTP.

`python -m perf.gpu` wherever there is a GPU; with `--device cpu --quick` it tries itself out without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perf.tools import report
from perf.tools.load import Load, LoadGenerator
from perf.tools.report import number
from perf.tools.servers import Options, prepare_libraries, serving
from perf.tools.texts import SHAPES, Shape, TextSource
from perf.tools.workers import worker
from staged_pool.runtime.config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from perf.gpu.checks import Check
    from staged_pool.runtime.model import Payload
    from staged_pool.runtime.models.encoder import Encoder

TEXT_TOKENS: Final = 64
PATIENCE_S: Final = 60.0
PIXELS: Final = (32, 3, 224, 224)
"""Shape of the bytes that are copied: a batch of images."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Amount of work of one run."""

    kinds: int
    """Number of tiny models that are checked."""
    tokens: tuple[int, ...]
    """Tokens of the batches that are timed."""
    repeats: int
    """Repeats of each timing, of which the median counts."""
    clients: tuple[int, ...]
    loads: tuple[Shape, ...]
    seconds: float
    """Length of one cell over HTTP."""


FULL: Final = Scope(
    3, (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), 30, (1, 16, 64, 256), ("s1", "m8", "x64"), 8.0
)
QUICK: Final = Scope(1, (64, 256), 5, (1, 8), ("m8",), 2.0)

main = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@main.command()
def gpu(
    *,
    device: Annotated[str, typer.Option(help="Device, as for `staged-pool serve`.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Model that is timed. Default: the server's default, if it is local.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute, as a check.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for gpu.json and gpu.md.")] = report.RESULTS,
) -> None:
    """Check and time one device; the exit code is 1 if a result is wrong."""
    prepare_libraries()
    scope = QUICK if quick else FULL
    settings = {"device": device, "model": model, "scope": asdict(scope), "text_tokens": TEXT_TOKENS}
    with TemporaryDirectory(prefix="perf-gpu-") as name, report.recording("gpu", settings, folder=results) as record:
        run = Run(device, scope, Path(name), record)
        wrong = run.check(model)
        tables = [*run.time_forwards(), run.time_copies(), run.time_http()]
        report.write_markdown("gpu", *(table for table in tables if table[1]), note=run.facts(), folder=results)
    if wrong:
        typer.echo(f"{wrong} ways of computing are wrong", err=True)
        raise typer.Exit(1)


Table = tuple[Sequence[str], Sequence[Sequence[str]]]


class Run:
    """One run of all checks and timings.

    Args:
        device: Name of the device.
        scope: Amount of work.
        folder: Folder for generated models.
        record: Record of the results.
    """

    def __init__(self, device: str, scope: Scope, folder: Path, record: report.Record) -> None:
        from staged_pool.runtime.models.devices.accelerators import open_devices

        self._name = device
        self._device = open_devices(device)[0]
        self._scope = scope
        self._folder = folder
        self._record = record
        self._model = ""
        record.results["device"] = self._device_facts()

    def facts(self) -> str:
        """Return a line about the device and the model."""
        device = ", ".join(f"{name} {value}" for name, value in self._device_facts().items())
        return f"{device}; model: {self._record.results['model']}; forwards of texts of {TEXT_TOKENS} tokens."

    def check(self, model: str | None) -> int:
        """Find the model that is timed, and run all checks; return the number that failed."""
        from perf.gpu.checks import KINDS, SEEING, check_images, check_texts
        from tests.models.tiny import build

        self._model, self._record.results["model"] = self._find(model)
        kinds = KINDS[: self._scope.kinds]
        texts = [
            "a",
            "of the same length",
            "of another length than that",
            "as long as a sentence that goes on for a bit",
        ]
        checks: list[Check] = []
        with report.progress("checks", len(kinds) + 2) as bar:
            for kind in kinds:
                checks += check_texts(kind, build(kind, self._folder / kind), self._name, texts)
                bar.advance(bar.task_ids[0])
            checks += check_texts("the one that is timed", Path(self._model), self._name, texts)
            bar.advance(bar.task_ids[0])
            checks += check_images(build(SEEING, self._folder / SEEING), self._name)
        self._record.results["checks"] = checks
        rows = [
            [f"{one.model}: {one.way}", f"{one.difference:.2g}", f"{one.limit:g}", "yes" if one.passed else "NO"]
            for one in checks
        ]
        report.show_table("Against padded batches in float32 on the CPU", ["", "difference", "limit", "right"], rows)
        return sum(not one.passed for one in checks)

    def time_forwards(self) -> Iterator[Table]:
        """Time single forwards, computed and replayed; and many, with one or two in flight."""
        ways = {"computed": False, "replayed": True} if self._device.type == "cuda" else {"computed": False}
        rows, depths = [], []
        cells: list[dict[str, object]] = []
        with report.progress("forwards", len(ways) * len(self._scope.tokens)) as bar:
            for way, graphs in ways.items():
                model = self._load(cuda_graphs=graphs)
                for tokens in self._scope.tokens:
                    forward = partial(model.forward, _batch(model, tokens))
                    alone_s = _median_s(forward, self._scope.repeats)
                    one_s, two_s = (_many_s(forward, depth, self._scope.repeats) for depth in (1, 2))
                    cells.append({"way": way, "tokens": tokens, "alone_s": alone_s, "one_s": one_s, "two_s": two_s})
                    rows.append([f"{way}, {tokens}", number(alone_s * 1e3), number(tokens / alone_s)])
                    depths.append(
                        [f"{way}, {tokens}", *(number(tokens / s) for s in (one_s, two_s)), f"{one_s / two_s:.2f}"]
                    )
                    bar.advance(bar.task_ids[0])
        self._record.results["forwards"] = cells
        yield _shown("Forwards", ["way, tokens", "ms", "tokens/s"], rows)
        columns = ["way, tokens", "tokens/s, one under way", "two under way", "ratio"]
        yield _shown("Forwards under way", columns, depths)

    def time_copies(self) -> Table:
        """Time copies of pinned and ordinary memory, and one beside a forward; nothing on the CPU."""
        columns = ["", "ms", "GB/s"]
        if self._device.type != "cuda":
            return columns, []
        import torch

        pinned, ordinary = (torch.zeros(PIXELS, dtype=torch.uint8, pin_memory=pin) for pin in (True, False))
        on_device = torch.zeros(PIXELS, dtype=torch.float32, device=self._device)
        model = self._load()
        batch = _batch(model, self._scope.tokens[-1])
        copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def beside() -> None:
            with torch.cuda.stream(copying):
                pinned.to(self._device, non_blocking=True)
            model.forward(batch)

        timed: dict[str, tuple[Callable[[], object], int]] = {
            "to the device, pinned": (lambda: pinned.to(self._device, non_blocking=True), pinned.nbytes),
            "to the device, ordinary": (lambda: ordinary.to(self._device), ordinary.nbytes),
            "to the host, pinned": (partial(_read_back, on_device), on_device.nbytes),
            "to the host, ordinary": (on_device.cpu, on_device.nbytes),
            "a forward": (lambda: model.forward(batch), 0),
            "a forward beside a copy to the device": (beside, 0),
        }
        rows = []
        for name, (copy, size) in timed.items():
            seconds = _median_s(partial(self._ended, copy), self._scope.repeats)
            self._record.results[name] = seconds
            rows.append([name, number(seconds * 1e3), number(size / seconds / 1e9) if size else "-"])
        return _shown("Copies", columns, rows)

    def time_http(self) -> Table:
        """Measure texts a second over HTTP, by number of clients."""
        options = Options(model=self._model, device=self._name)
        source = TextSource(self._model)
        rows, cells = [], []
        scope = self._scope
        with serving(options.serve_command()) as server:
            server.card()
            with report.progress("HTTP", len(scope.loads) * len(scope.clients)) as bar:
                for shape in scope.loads:
                    load = source.workload(shape)
                    with worker(partial(LoadGenerator, server.port, load.requests)) as generate:
                        generate(Load(clients=1, max_requests=8))
                        for clients in scope.clients:
                            found = generate(Load(clients=clients, seconds=scope.seconds, patience_s=PATIENCE_S))
                            texts_per_s = found.rate * load.texts_per_request
                            summary = report.Summary.of(found.latencies_ms)
                            cells.append({"load": shape, "clients": clients, "texts_per_s": texts_per_s, "ms": summary})
                            cores = found.client_cpu_s / found.elapsed_s
                            rows.append(
                                [
                                    f"{shape}, {clients}",
                                    number(texts_per_s),
                                    *report.Summary.cells(summary),
                                    f"{cores:.2f}",
                                ]
                            )
                            bar.advance(bar.task_ids[0])
        self._record.results["http"] = cells
        columns = ["load, clients", "texts/s", "p50 (ms)", "p99", "max", "n", "cores of the client"]
        return _shown(f"HTTP; {'; '.join(f'{one}: {SHAPES[one]}' for one in scope.loads)}", columns, rows)

    def _load(self, *, cuda_graphs: bool = True) -> Encoder:
        from staged_pool.runtime.models.load import load_model

        return load_model(EngineConfig(model=self._model, device=self._name, offline=True, cuda_graphs=cuda_graphs))

    def _ended(self, copy: Callable[[], object]) -> None:
        import torch

        copy()
        torch.cuda.synchronize(self._device)

    def _find(self, model: str | None) -> tuple[str, str]:
        """Return the folder and the name of the model that is timed."""
        from staged_pool.runtime.models.folders.resolver import resolve
        from staged_pool.stages.errors import ConfigError

        try:
            found = resolve(model, offline=True)
        except ConfigError:
            if model is not None:
                raise
            return str(_like_minilm(self._folder / "like-minilm")), "of the size of MiniLM, with random weights"
        return str(found.folder), found.name

    def _device_facts(self) -> dict[str, object]:
        import torch

        if self._device.type != "cuda":
            return {"device": str(self._device), "torch": torch.__version__}
        found = torch.cuda.get_device_properties(self._device)
        return {
            "device": str(self._device),
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "capability": f"{found.major}.{found.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }


def _like_minilm(folder: Path) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    from tests.models.tiny.bodies import save
    from tests.models.tiny.vocabularies import word_piece

    torch.manual_seed(0)
    tokenizer = word_piece()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    save(folder, BertModel(config), tokenizer)
    return folder


def _read_back(rows: Tensor) -> None:
    from staged_pool.runtime.models.kernels.transfer import begin_readback

    begin_readback(rows)()


def _batch(model: Encoder, tokens: int) -> Sequence[Payload]:
    return model.towers["text"].sample_batch([TEXT_TOKENS] * (tokens // TEXT_TOKENS))


def _median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in seconds, after two warm-up calls."""
    taken = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def _many_s(forward: Callable[[], object], at_once: int, repeats: int) -> float:
    """Return the mean seconds of a forward, with `at_once` of them in flight."""
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(lambda _: forward(), range(2 * at_once)))
        started = time.perf_counter()
        list(threads.map(lambda _: forward(), range(2 * repeats)))
        return (time.perf_counter() - started) / (2 * repeats)


def _shown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    report.show_table(title, columns, rows)
    return columns, rows


if __name__ == "__main__":
    main()
