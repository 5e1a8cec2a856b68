"""A real server in a process of its own, and its memory."""

from __future__ import annotations

import json
import os
import resource
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from staged_pool.api.http.listener import bind_udp
from tests.hostile.attack import ATTACKER_KEY, BYSTANDER_KEY, Setting

READY_WITHIN_S = 120.0


@dataclass
class Running:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    port: int
    quic_port: int | None = None
    trust: ssl.SSLContext | None = None
    """Trust in the server's certificate, if it has one."""
    log: list[dict[str, object]] = field(default_factory=list)

    def forget_peak(self) -> None:
        """Count the peak of its resident set from now on (see proc(5), clear_refs)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """Peak of its resident set."""
        return self._status("VmHWM:")

    @property
    def resident_bytes(self) -> int:
        return self._status("VmRSS:")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise LookupError(f"{name} is not told")


@contextmanager
def running(setting: Setting) -> Iterator[Running]:
    """Run a server of two keys; the block begins when it takes requests."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "STAGED_POOL_API_KEY": f"{BYSTANDER_KEY} {ATTACKER_KEY}"}
        command = [
            sys.executable,
            "-c",
            "from staged_pool.api.commands.cli import main; main()",
            "serve",
            "--port",
            "0",
        ]
        command += ["--log-format", "json", "--no-access-log", *setting.flags, *_model(setting.model, folder)]
        quic_port = _free_udp_port() if setting.quic else None
        if quic_port is not None:
            command += ["--quic-port", str(quic_port), *_certificate(Path(folder))]

        def limit() -> None:
            if setting.address_space_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (setting.address_space_bytes,) * 2)

        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            preexec_fn=limit,  # noqa: PLW1509  # it calls one function of C, which takes no lock
        )
        server = Running(process, 0, quic_port, None if quic_port is None else _trust(Path(folder)))
        ready = threading.Event()
        reader = threading.Thread(target=_read_log, args=(server, ready), daemon=True)
        reader.start()
        try:
            if not ready.wait(READY_WITHIN_S) or process.poll() is not None:
                raise RuntimeError(f"the server did not start: {server.log[-5:]}")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                reader.join()
                if process.stderr is not None:
                    process.stderr.close()


def _read_log(server: Running, ready: threading.Event) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"event": "not json", "line": line.decode(errors="replace")}
        server.log.append(entry)
        if entry.get("event") == "server.listening":
            server.port = int(str(entry["url"]).rsplit(":", 1)[1])
        if entry.get("event") == "server.ready":
            ready.set()
    ready.set()  # its end: there is nothing more to wait for


def _free_udp_port() -> int:
    with bind_udp("127.0.0.1", 0) as free:
        port: int = free.getsockname()[1]
        return port


def _certificate(folder: Path) -> list[str]:
    """Make a certificate in a folder, and return the flags of it."""
    root = trustme.CA()
    root.cert_pem.write_to_path(folder / "root.pem")
    issued = root.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    return ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]


def _trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "root.pem")


def _model(kind: str | None, folder: str) -> list[str]:
    if kind is None:
        return []
    from tests.models.tiny import build  # torch: seconds to import

    return ["--model", str(build(kind, Path(folder) / kind))]
