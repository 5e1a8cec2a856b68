"""`python -m perf.gpu right`: compare everything that a device computes with float32 on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perf.tools import report
from perf.tools.servers import prepare_libraries
from perf.tools.workers import Worker, worker
from staged_pool.runtime.machine.cores import usable_cores

if TYPE_CHECKING:
    from perf.gpu.findings import Finding

_QUICK_KINDS: Final = ("bge-m3", "clip")
_CORES_OF_WORKER: Final = 4
"""Cores for each process that checks tiny models."""
_MOST_WORKERS: Final = 4
_KIND_LIMIT_S: Final = 90.0
"""Longest check of one kind, the start of its process included."""
_SANITIZER_LIMIT_S: Final = 60.0
_ALL_LIMIT_S: Final = 230.0
"""Time of the whole command; the sanitizer comes last, and gets the rest."""


def right(
    *,
    device: Annotated[str, typer.Option(help="Device, as for `staged-pool serve`.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Model that is served. Default: one of MiniLM's shape, with random weights.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute, as a check.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for gpu-right.json.")] = report.RESULTS,
) -> None:
    """Compare results with float32 on the CPU: tiny models, a server, and memory that runs out.

    The exit code is 1 if a result is wrong.
    """
    prepare_libraries()
    from perf.gpu.right_tables import show

    started = time.perf_counter()
    settings = {"device": device, "model": model, "quick": quick}
    with (
        TemporaryDirectory(prefix="perf-gpu-") as name,
        report.recording("gpu-right", settings, folder=results) as record,
    ):
        record.results["device"] = device_facts(device)
        findings = list(_all(Path(name), device, model, quick=quick, started=started))
        record.results["findings"] = findings
        record.results["seconds"] = round(time.perf_counter() - started, 1)
    show(findings)
    if not all(finding.right for finding in findings):
        raise typer.Exit(1)


def _all(folder: Path, device: str, model: str | None, *, quick: bool, started: float) -> Iterator[Finding]:
    """Run all checks; those of memory, and the sanitizer, have the device for themselves."""
    from perf.gpu.findings import Finding, failed, guarded
    from perf.gpu.full_device import NAME, FullDevice
    from perf.gpu.right_http import Volume, check_traffic
    from perf.gpu.sanitized import check_memory_accesses
    from perf.gpu.tiny_models import KINDS
    from staged_pool.runtime.models.devices.accelerators import open_devices

    on_gpu = open_devices(device)[0].type == "cuda"
    volume = Volume(60, 8, 30, 30) if quick else Volume(2000, 32, 400, 120)
    traffic = partial(check_traffic, folder, device, model, volume)
    # One thread makes and loads models: transformers changes torch for all threads meanwhile.
    with ThreadPoolExecutor(1) as waiting, ThreadPoolExecutor(1) as loading:
        tiny = waiting.submit(check_kinds, _QUICK_KINDS if quick else KINDS, folder, device)
        served = loading.submit(lambda: list(guarded(traffic, partial(failed, "served", "", "traffic"))))
        full = loading.submit(FullDevice.prepare, folder, volume.texts) if on_gpu else None
        yield from tiny.result()
        yield from served.result()
    if full is None:
        yield Finding(NAME, "", "left out", right=True, note="the memory of a CPU cannot be filled safely")
    else:
        yield from guarded(lambda: full.result().check(device, volume), partial(failed, NAME, "", "memory"))
        limit_s = min(_SANITIZER_LIMIT_S, _ALL_LIMIT_S - (time.perf_counter() - started))
        sanitized = partial(check_memory_accesses, device, limit_s)
        yield from guarded(lambda: [sanitized()], partial(failed, "compute-sanitizer", "memcheck", "start"))


def check_kinds(kinds: Iterable[str], folder: Path, device: str) -> list[Finding]:
    """Check tiny models in a few processes at once; a process that fails is replaced by a new one."""
    from perf.gpu.tiny_models import TinyModels

    cores = usable_cores()
    at_once = max(1, min(_MOST_WORKERS, cores // _CORES_OF_WORKER))
    left: SimpleQueue[str] = SimpleQueue()
    for kind in kinds:
        left.put(kind)
    make = partial(TinyModels, folder, device, max(1, cores // at_once))
    with ThreadPoolExecutor(at_once) as threads:
        parts = list(threads.map(lambda _: _check_queue(left, make), range(at_once)))
    return [finding for part in parts for finding in part]


def _check_queue(left: SimpleQueue[str], make: Callable[[], Callable[[str], list[Finding]]]) -> list[Finding]:
    """Check the kinds of a queue in a process, until the queue is empty."""
    from perf.gpu.findings import failed

    findings: list[Finding] = []
    with ExitStack() as stack:
        process: Worker[str, list[Finding]] | None = None
        while (kind := _next(left)) is not None:
            started = time.perf_counter()
            process = process or stack.enter_context(worker(partial(_answering, make)))
            try:
                process.begin(kind)
                found = process.end(_KIND_LIMIT_S)
            except (RuntimeError, OSError) as error:  # a time limit that passed is an OSError
                found = [failed(kind, "all", "the process", error)]
            findings += found
            wrong = sum(not finding.right for finding in found)
            report.console.print(
                f"{kind}: {len(found)} checks, {wrong} wrong, {time.perf_counter() - started:.1f} s", soft_wrap=True
            )
            if wrong:  # a device error spoils all that comes after it in the same process
                stack.pop_all().close()
                process = None
    return findings


def _answering(make: Callable[[], Callable[[str], list[Finding]]]) -> Callable[[str], list[Finding]]:
    """Prepare the libraries of a new process, and return its answer to each kind."""
    prepare_libraries()
    return make()


def _next(left: SimpleQueue[str]) -> str | None:
    try:
        return left.get_nowait()
    except Empty:
        return None


def device_facts(device: str) -> dict[str, object]:
    """Return facts about the device, and about the versions that its results depend on."""
    import torch

    from staged_pool.runtime.models.devices.accelerators import open_devices

    opened = open_devices(device)[0]
    facts: dict[str, object] = {"device": str(opened), "torch": torch.__version__}
    if opened.type == "cuda":
        found = torch.cuda.get_device_properties(opened)
        facts |= {
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
        }
    return facts
