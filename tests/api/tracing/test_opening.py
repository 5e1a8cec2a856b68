"""Traces that are off, that cannot be on, and that go nowhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from click.testing import CliRunner

from staged_pool.api.commands import cli
from staged_pool.api.config import ServerConfig
from staged_pool.api.trace_endpoint import shown, traces_url
from staged_pool.stages.errors import ConfigError

PROGRAM = """
import sys, anyio
from tests.servers.on_socket import serving

async def run():
    async with serving({config}) as served, served.client() as client:
        assert (await client.post("/v1/embeddings", json={{"input": "a"}})).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
    return sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry")

print(anyio.run(run))
"""


def _imported(config: str) -> str:
    """Return the modules of OpenTelemetry that a server has imported when it ends."""
    program = PROGRAM.format(config=config)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_a_server_without_traces_imports_nothing_of_opentelemetry() -> None:
    assert _imported("") == "[]"


def test_a_server_with_traces_imports_it() -> None:
    assert "opentelemetry.sdk.trace" in _imported("trace_endpoint='http://127.0.0.1:9', trace_ratio=0.0")


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_a_server_that_lacks_the_packages_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    result = CliRunner().invoke(cli.main, ["serve", "--port", "0", "--trace-endpoint", "http://localhost:4318"])
    assert result.exit_code == 2
    assert "pip install 'staged-pool[otel]'" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_a_url_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    ServerConfig(trace_endpoint=endpoint)
    assert traces_url(endpoint) == url
    assert url.startswith(shown(endpoint))


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a:port", "http://[a"]
)
def test_what_is_no_url_is_rejected(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^trace_endpoint=.*http://localhost:4318"):
        ServerConfig(trace_endpoint=endpoint)


def test_a_password_is_not_taken_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        ServerConfig(trace_endpoint="http://user:secret@localhost:4318")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_is_part_of_one(ratio: float) -> None:
    with pytest.raises(ConfigError, match="trace_ratio"):
        ServerConfig(trace_ratio=ratio)
