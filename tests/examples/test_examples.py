"""The programs in `examples/` run, and give the right results."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import nbclient
import nbformat
import pytest
from blockbuster import BlockBuster

from tests.servers.hosts import HOSTS, hosting
from tests.servers.tiny_models import folder

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = ["A man is eating food.", "A plane is taking off."]


@pytest.fixture(autouse=True)
def programs_may_load(nothing_blocks_the_event_loop: BlockBuster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow imports, and give the programs a tiny model."""
    nothing_blocks_the_event_loop.deactivate()
    monkeypatch.setenv("MODEL", str(folder("embedder")))


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[([^\]]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    present = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert {name.rstrip("/") for name in listed} == present


@HOSTS
@pytest.mark.anyio
async def test_the_fastapi_endpoint(kind: str) -> None:
    example = importlib.reload(importlib.import_module("examples.fastapi_endpoint"))  # it reads MODEL
    async with hosting(kind, example.app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.post("/best", json={"query": TEXTS[1], "documents": TEXTS})
        assert answer.raise_for_status().json()["document"] == TEXTS[1]
        answer = await client.post("/best", json={"query": "", "documents": TEXTS})
        assert (answer.status_code, "query" in answer.json()["detail"]) == (400, True)
        answer = await client.post("/pool/v1/embeddings", json={"input": TEXTS})
        assert len(answer.raise_for_status().json()["data"]) == 2
        assert example.pool.engine.statistics().admission.requests == 0


def test_the_trio_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS) + "\n\n")
    monkeypatch.setattr(sys, "argv", ["trio_program.py", str(lines), *TEXTS])
    runpy.run_path(str(EXAMPLES / "trio_program.py"), run_name="__main__")
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 4
    for text in TEXTS:
        best, other = [line for line in printed if line[0] == text]
        assert (best[1:], other[2]) == (["1.000", text], TEXTS[TEXTS.index(text) - 1])


def test_the_trio_program_says_how_to_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trio_program.py", "/no/such/file", "a query"])
    with pytest.raises(SystemExit, match=r"usage: trio_program\.py FILE QUERY"):
        runpy.run_path(str(EXAMPLES / "trio_program.py"), run_name="__main__")


def test_the_fixture_of_pytest(tmp_path: Path) -> None:
    copy = tmp_path / "test_search.py"
    copy.write_text((EXAMPLES / "pytest_fixture.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(copy)]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


@pytest.mark.long
def test_the_notebook() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "execute_result"
    ]
    assert len(shown) == 4
    assert re.fullmatch(r"\(3, \d+\)", shown[1])
