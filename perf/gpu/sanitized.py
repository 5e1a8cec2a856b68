"""Forwards of tiny models, short enough to run under compute-sanitizer.

`compute-sanitizer --tool memcheck python -m perf.gpu.sanitized` finds kernels that read or write memory that is not
theirs: texts packed in one call and replayed, an image batch, and pinned copies to the device and back.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import psutil
import torch
import typer
from torch import Tensor

from perf.gpu.findings import Finding, as_rows
from perf.gpu.inputs import inputs_of
from perf.gpu.loaded import prepared, text_transformer
from perf.tools.servers import ROOT, family
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, cuda_recorder
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import DENSE_ONLY, Output

_SANITIZER: Final = "compute-sanitizer"
_SANITIZER_LEAST_S: Final = 15.0
"""Shortest limit that is worth a start."""
_FOUND: Final = 9
"""Exit code of the sanitizer if it has found an error."""
_SHORT: Final = 30
"""Tokens of the longest text that is taken: all of them together fit into the smallest recorded size."""

main = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@main.command()
def sanitized(*, device: Annotated[str, typer.Option(help="Device, as for `staged-pool serve`.")] = "cuda") -> None:
    """Run a few forwards; the exit code is 1 if a replay gives other vectors."""
    from tests.models.tiny import build

    with TemporaryDirectory(prefix="perf-sanitized-") as name:
        texts, images = (_load(build(kind, Path(name) / kind), device) for kind in ("bert-mean", "clip"))
        computed = _forward(texts, "text")
        typer.echo(f"{len(computed)} texts, in one call: {text_transformer(texts).attends_in_one_call}")
        if not texts.card.device.startswith("cpu"):
            replica = next(iter(texts.replicas))
            speedups = Speedups(text_transformer(texts), texts.card.max_tokens)
            with replica.launching("text"):
                reason = speedups.record(cuda_recorder(replica.device), BUCKETS[:1])
            apart = difference(_forward(texts, "text"), computed)
            typer.echo(f"replayed: {reason or 'yes'}, difference {apart:.2g}")
            if not apart <= TOLERANCE[torch.bfloat16]:
                raise typer.Exit(1)
        typer.echo(f"{len(_forward(images, 'image'))} images")


def _load(folder: Path, device: str) -> Encoder:
    return load_model(EngineConfig(model=str(folder), offline=True, device=device, dtype="bfloat16", cuda_graphs=False))


def _forward(model: Encoder, lane: Lane) -> Tensor:
    payloads = prepared(model, inputs_of(lane, DENSE_ONLY))
    rows = model.forward([payload for payload in payloads if lane == "image" or payload.tokens <= _SHORT])
    values = []
    for row in rows:
        if not isinstance(row, Row):
            raise RuntimeError(f"the model failed on an input: {row}")
        values.append(row.values[Output.DENSE])
    return as_rows(Output.DENSE, values, vocabulary=0)


def check_memory_accesses(device: str, limit_s: float) -> Finding:
    """Run a few forwards under compute-sanitizer, if it is there and enough time is left."""
    left_out = partial(Finding, _SANITIZER, "memcheck", "left out", right=True)
    program = shutil.which(_SANITIZER)
    if program is None:
        return left_out(note=f"{_SANITIZER} is not on the PATH")
    if limit_s < _SANITIZER_LEAST_S:
        return left_out(note="no time is left for it")
    command = [program, "--tool", "memcheck", "--error-exitcode", str(_FOUND)]
    command += [sys.executable, "-m", "perf.gpu.sanitized", "--device", device]
    with TemporaryDirectory(prefix="perf-sanitizer-") as name:
        log = Path(name) / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return left_out(note=f"not finished in {limit_s:.0f} s")
        finally:
            for one in reversed(family(process.pid)):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
        text = log.read_text(errors="replace")
    if "not supported" in text:
        return left_out(note="it does not support this machine")
    note = " ".join(text[-300:].split())
    return Finding(_SANITIZER, "memcheck", f"exit code {code}", right=not code, note=note)


if __name__ == "__main__":
    main()
