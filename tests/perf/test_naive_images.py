"""The handler that one writes first answers all that it is compared in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf.tools.jpegs import embedding_request, jpeg, score_request
from perf.tools.servers import serving
from perf.under_load.liveness_images import burning
from tests.models.tiny.images import clip


@pytest.mark.parametrize(
    "own_code",
    [
        pytest.param(False, id="plain", marks=pytest.mark.long),
        pytest.param(True, id="a processor that burns CPU"),  # a copy of the plain one, with code of its own
    ],
)
def test_the_naive_server_answers_the_requests_of_every_load(tmp_path: Path, *, own_code: bool) -> None:
    made = tmp_path / "clip"
    made.mkdir()
    clip(made)
    with burning(made) as copy:
        folder, trusted = (copy, ["--trust-remote-code"]) if own_code else (made, [])
        command = [sys.executable, "-m", "perf.contenders.naive_images", "--folder", str(folder), "--dtype", "float32",
                   "--torch-threads", "1", *trusted]  # fmt: skip
        modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}  # where code of the folder is copied to
        with serving(command, variables=modules) as server:
            for request in (embedding_request([jpeg("vga", 0)]), score_request("a text", [jpeg("vga", 0)])):
                assert b'"data":[{"index":0,' in server.wait_answer(request).body
        assert (tmp_path / "modules").exists() == own_code
