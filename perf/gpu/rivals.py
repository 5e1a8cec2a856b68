"""Servers of one model on one device, all started before the first is measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perf.peers.catalogue import SERVICES
from perf.peers.dialects import OPENAI, Vectors, least_cosine
from perf.tools.servers import PREPARED, Options, Server, ServerFailed, serving
from staged_pool.runtime.config import DType

if TYPE_CHECKING:
    import torch

OURS: Final = "staged-pool"
INFINITY: Final = "infinity"
NAIVE: Final = "naive"

AGREED: Final = 0.999
"""Minimum cosine of the vectors of a server with ours, in bfloat16."""

START_TIMEOUT_S: Final = {"cuda": 60.0, "cpu": 120.0}
"""Limit for the start of a server, by the type of the device: time on a GPU is short, and a busy CPU is slow."""

_INFINITY_PROGRAM: Final = "from infinity_emb.cli import cli; cli()"
_INFINITY_BATCH: Final = 128
"""Maximum texts of its batches: its default of 32 does not fill a GPU."""
_INFINITY_CPU_BATCH: Final = 8
"""The same on a CPU, where its warm-up with full batches takes minutes."""


@dataclass(frozen=True, slots=True, eq=False)
class Rival:
    """One server of the comparison."""

    name: str
    command: list[str]
    """Command, to which `--port` is appended."""
    start_timeout_s: float
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """Servers that answer, and the reasons of those that do not."""

    ports: dict[str, int]
    cosines: dict[str, float]
    """Lowest cosine of the vectors of each server with ours."""
    failures: dict[str, str]


def rivals(folder: Path, device: torch.device, dtype: DType, infinity: Path | None) -> tuple[Rival, ...]:
    """Return our server, the naive ones, and Infinity if there is an interpreter with it.

    Args:
        folder: Folder of the model, the same for all.
        device: Device, the same for all.
        dtype: Data type, the same for all.
        infinity: Interpreter of an environment with infinity-emb.
    """
    naive = [sys.executable, str(SERVICES / "serve_naive.py")]
    variables = {
        "PEER_MODEL": str(folder),
        "PEER_DTYPE": dtype,
        "PEER_DEVICE": str(device),
        "PEER_THREADS": str(os.cpu_count() or 1),
    }
    ours = Options(model=str(folder), device=str(device), dtype=dtype).serve_command()
    limit_s = START_TIMEOUT_S[device.type]
    found = [Rival(OURS, ours, limit_s)]
    if infinity is not None:
        command = _infinity(infinity, folder, device, dtype)
        found.append(Rival(f"{INFINITY}-bettertransformer", [*command, "--bettertransformer"], limit_s))
        found.append(Rival(f"{INFINITY}-sdpa", [*command, "--no-bettertransformer"], limit_s))
    found.append(Rival(f"{NAIVE}-inline", naive, limit_s, variables))
    found.append(Rival(f"{NAIVE}-threadpool", [*naive, "--threadpool"], limit_s, variables))
    return tuple(found)


def _infinity(python: Path, folder: Path, device: torch.device, dtype: DType) -> list[str]:
    """Return the command of Infinity without BetterTransformer's flag.

    torch.compile is off: Infinity does not start with it and BetterTransformer, and advises against it for BERT.
    """
    batch = _INFINITY_CPU_BATCH if device.type == "cpu" else _INFINITY_BATCH
    settings = {
        "--model-id": folder, "--engine": "torch", "--dtype": dtype, "--device": device.type, "--batch-size": batch,
        "--host": "127.0.0.1", "--url-prefix": "/v1",
    }  # fmt: skip
    given = [str(part) for pair in settings.items() for part in pair]
    if device.index is not None:
        given += ["--device-id", str(device.index)]
    return [str(python), "-c", _INFINITY_PROGRAM, "v2", *given, "--no-compile"]


@contextmanager
def started(
    servers: tuple[Rival, ...], texts: list[str], scratch: Path, tell: Callable[[str], None]
) -> Iterator[Started]:
    """Start servers, ours first and alone, because it measures the device; compare their vectors with ours.

    A server that does not start, or whose vectors are others, is stopped; its reason is kept.

    Args:
        servers: Servers, of which the first is ours.
        texts: Texts whose vectors are compared.
        scratch: Working directory of the servers.
        tell: Called with a line about each server.

    Raises:
        ServerFailed: Our own server did not start.
    """
    request = OPENAI.embed(texts)
    seen = Started({}, {}, {})
    with ExitStack() as running:
        ours = running.enter_context(_starting(servers[0], scratch))
        wanted = OPENAI.vectors(ours.wait_answer(request).body)
        seen.ports[servers[0].name], seen.cosines[servers[0].name] = ours.port, 1.0
        tell(f"{servers[0].name} answers after {ours.age_s():.1f} s")
        stacks = {rival: running.enter_context(ExitStack()) for rival in servers[1:]}
        loading: dict[str, tuple[ExitStack, Server]] = {}
        for rival, stack in stacks.items():
            try:
                loading[rival.name] = stack, stack.enter_context(_starting(rival, scratch))
            except OSError as error:
                seen.failures[rival.name] = f"cannot be started: {error}"
        for name, (stack, server) in loading.items():
            try:
                seen.cosines[name] = _cosine(wanted, server.wait_answer(request).body)
                seen.ports[name] = server.port
            except (ServerFailed, ValueError, KeyError, TypeError) as error:
                seen.failures[name] = str(error)
                stack.close()
            tell(f"{name}: {seen.failures.get(name) or f'answers after {server.age_s():.1f} s'}")
        yield seen


def _starting(rival: Rival, scratch: Path) -> AbstractContextManager[Server]:
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return serving(
        rival.command,
        folder=scratch,
        variables=offline | dict(rival.variables),
        without=PREPARED,  # each server as it starts for its users
        start_timeout_s=rival.start_timeout_s,
    )


def _cosine(ours: Vectors, body: bytes) -> float:
    """Return the lowest cosine of the vectors of an answer with ours.

    Raises:
        ValueError: The cosine is below `AGREED`, or the answer has other vectors.
    """
    cosine = least_cosine(ours, OPENAI.vectors(body))
    if cosine < AGREED:
        raise ValueError(f"least cosine of its vectors with ours: {cosine:.4f}, expected at least {AGREED}")
    return cosine
