"""`serve --api-servers N`: a supervisor in this process, and fronts and an engine process under it."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from staged_pool.api.commands.process import run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.machine.interpreter import module_command
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from staged_pool.api.fleet.processes import Files
    from staged_pool.runtime.pipelines.file import PipelineFile  # imported when there is one

CHILD: Final = "staged_pool.api.commands.child"


def check_fleet(api_servers: int, server: ServerConfig, models: Sequence[EngineConfig]) -> None:
    """Reject settings that need a server of one process.

    Raises:
        ConfigError: One of them is given.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError(f"api_servers={api_servers}: needs shared memory that only Linux has; leave it at 0")
    for name, value, why in (
        ("quic_port", server.quic_port, "a datagram of HTTP/3 could reach any of the fronts"),
        ("batch_dir", server.batch_dir, "one process must own the folder"),
        (
            "admin_api_key",
            "..." if server.admin_api_keys else None,
            "another process loads models",
        ),
        ("plugin", next((model.plugin for model in models if model.plugin), None), "hooks run in one process"),
    ):
        if value is not None:
            raise ConfigError(f"{name}={value!r}: does not go together with api_servers={api_servers}: {why}")


def supervise(
    process: ProcessConfig,
    server: ServerConfig,
    models: Sequence[EngineConfig],
    pipelines: Sequence[PipelineFile],
    listener: socket.socket,
) -> int:
    """Run the processes of a server until a signal ends them. Returns the exit code of this process.

    Args:
        process: Settings of all processes, and the number of fronts.
        server: Settings of HTTP.
        models: Models of the engine process.
        pipelines: Pipelines to serve, on these models.
        listener: The listening socket.
    """
    from staged_pool.api.commands.child_run import ChildSettings
    from staged_pool.api.fleet.processes import Launch
    from staged_pool.api.fleet.supervisor import Outside, Supervisor

    def settings(name: str, files: Files) -> bytes:
        return pickle.dumps(
            ChildSettings(
                name=name,
                process=process,
                server=server,
                models=models,
                pipelines=pipelines,
                files=files,
            )
        )

    supervisor = Supervisor(
        Outside(Launch(module_command(CHILD), listener.fileno(), settings)),
        fronts=process.api_servers,
        drain_s=server.drain_lead_s + max(model.drain_timeout_s for model in models),
        silent_s=max(model.watchdog_s for model in models),
    )
    codes: list[int] = []

    async def program() -> None:
        codes.append(await supervisor.run(listener))

    run(process.backend, program)
    return codes[0]
