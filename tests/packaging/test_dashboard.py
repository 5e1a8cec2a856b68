"""The dashboard in deploy/grafana: it is what its builder makes, and each of its queries finds something."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.packaging.dashboard import FILE, build, concrete, queries
from tests.packaging.metrics_page import PAGE
from tests.page.browser import load, server

PROMETHEUS = shutil.which("prometheus")
WITHIN_S = 60.0


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


@pytest.mark.skipif(importlib.util.find_spec("grafana_foundation_sdk") is None, reason="its builder is not installed")
def test_the_file_is_what_the_builder_makes() -> None:
    assert FILE.read_text() == build(), "run `python -m tests.packaging.dashboard`"


def test_the_queries_name_metrics_that_exist() -> None:
    page = PAGE.read_text()
    named = {name for query in queries(board()) for name in re.findall(r"\b(?:staged_pool|process)_\w+", query)}
    assert len(named) > 20
    missing = [name for name in named if f"`{name}`" not in page]
    assert not [name for name in missing if f"`{re.sub('_(bucket|sum|count)$', '', name)}`" not in page]


def test_each_panel_has_a_title_an_explanation_and_a_query() -> None:
    panels = [panel for panel in board()["panels"] if panel["type"] != "row"]
    assert len(panels) > 15
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]


def ask(port: int, query: str) -> list[dict[str, Any]]:
    """Return the series that Prometheus finds; empty while it does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except (URLError, ConnectionError):
        return []
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus")
def test_each_query_finds_series_in_a_real_prometheus(tmp_path: Path) -> None:
    """A misspelt metric is no error there: it finds nothing."""
    assert PROMETHEUS is not None
    port = free_port()
    with server(tmp_path) as process, load(process.port, clients=4, texts=8):
        target = f"127.0.0.1:{process.port}"
        job = {"job_name": "staged-pool", "static_configs": [{"targets": [target]}]}
        config = tmp_path / "prometheus.json"
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
        command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as prometheus:
            try:
                left, latest = set(map(concrete, queries(board()))), time.monotonic() + WITHIN_S
                while left and time.monotonic() < latest:
                    left = {query for query in left if not ask(port, query)}
                    time.sleep(0.5)
                assert not left
                assert not ask(port, "staged_pool_no_such_metric")
            finally:
                prometheus.terminate()
