"""A real server in a process of its own, for attacks."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from staged_pool.api.http.listener import bind_udp
from tests.hostile.attack import ATTACKER_KEY, BYSTANDER_KEY, Setting
from tests.servers.certificates import Certificates
from tests.servers.process import ServerProcess, serve_command


class AttackedServer(ServerProcess):
    """A server of two keys.

    Args:
        setting: See `Setting`.
        folder: Takes its files, and its log.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        flags = ["--no-access-log", *setting.flags, *_model(setting.model, folder)]
        certificates = Certificates.made_in(folder) if setting.quic else None
        self.quic_port = None if certificates is None else _free_udp_port()
        if certificates is not None:
            flags += ["--quic-port", str(self.quic_port)]
            flags += [f"--{name.replace('_', '-')}={path}" for name, path in certificates.settings.items()]
        super().__init__(
            serve_command(*flags),
            folder / "log",
            environment={"STAGED_POOL_API_KEY": f"{BYSTANDER_KEY} {ATTACKER_KEY}"},
            key=ATTACKER_KEY,
            trust=None if certificates is None else certificates.trusting(),
            preloads=None if setting.starts_anew else "models",
        )


@contextmanager
def attacked(setting: Setting) -> Iterator[AttackedServer]:
    """Run a server; the block begins when it takes requests, and at its end the server drains."""
    with tempfile.TemporaryDirectory() as folder, AttackedServer(setting, Path(folder)) as server:
        if setting.address_space_bytes is not None:
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (setting.address_space_bytes,) * 2)
        server.wait_ready()
        try:
            yield server
        finally:
            server.end()


def _free_udp_port() -> int:
    with bind_udp("127.0.0.1", 0) as free:
        port: int = free.getsockname()[1]
        return port


def _model(kind: str | None, folder: Path) -> list[str]:
    if kind is None:
        return []
    from tests.models.tiny import build  # torch: seconds to import

    return ["--model", str(build(kind, folder / kind))]
