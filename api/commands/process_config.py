"""Settings of the process around a server or an engine: event loop, logs and the file of API keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from staged_pool.runtime.settings import setting

Backend: TypeAlias = Literal["asyncio", "trio"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings that only the command line has; no other process reads them."""

    backend: Backend = setting(
        "asyncio",
        "Event loop. asyncio uses uvloop where it is installed, and is the faster one.",
        group="Server",
    )
    api_servers: int = setting(
        0,
        "Front processes for HTTP, tokenizing and images, before one process for the device. 0: one does all.",
        group="Server",
        low=0,
        high=64,
        more="Use it when the Python code of one process is the limit: docs/processes.md.",
    )
    api_key_file: Path | None = setting(
        None,
        "File of API keys, one a line, to require on every route but those of probes. # begins a comment.",
        group="Access",
        basic=True,
        default_text="no key is required",
        more="Its keys are added to those of --api-key.",
    )
    pipeline: tuple[str, ...] = setting(
        (),
        "TOML file of a pipeline to serve: repeat the flag for several. docs/pipelines.md has more.",
        group="Model",
        metavar="FILE",
        more="Models that its stages name are loaded beside those of --model. If no --model is given, only they are.",
    )
    log_level: LogLevel = setting(
        "info",
        "Least severe level to log: debug, info, warning or error.",
        group="Logs",
        basic=True,
        metavar="LEVEL",
        more="debug includes the requests of probes.",
    )
    log_format: LogFormat = setting(
        "auto",
        "Format of the log on stderr: text, or one JSON object a line.",
        group="Logs",
        more="auto: text on a terminal, else json.",
    )
