"""Memory of answers over HTTP: of outcomes of pipelines and of routes of plugins, until they are sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from staged_pool.runtime.pipelines.file import PipelineFile, read_pipelines
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import EMBEDDER
from tests.support.model import LetterModel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

VECTORS = """
name = "vectors"

[[stage]]
name = "embed"
model = "letters"
outputs = ["multi_vector"]
"""
TEXT = "abcdefgh" * 8
OUTCOME_BYTES = 2 * len(TEXT) * 17
"""Memory of the vectors of a text, kept and written."""


@pytest.fixture
def pipelines(tmp_path: Path) -> Sequence[PipelineFile]:
    (tmp_path / "vectors.toml").write_text(VECTORS)
    return list(read_pipelines([tmp_path / "vectors.toml"]))


def texts(count: int) -> Sequence[str]:
    """Return different texts of one length."""
    return [f"{number}{TEXT}"[: len(TEXT)] for number in range(count)]


async def test_outcomes_that_never_fit_are_rejected_as_such_and_others_for_now(
    pipelines: Sequence[PipelineFile],
) -> None:
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=pipelines) as served, served.client() as client:
        account = served.engine.memory.budget.outcomes
        account.limit_bytes = 6 * OUTCOME_BYTES

        async def status(count: int) -> int:
            return (await client.post("/pipelines/vectors", json={"data": texts(count)})).status_code

        assert await status(4) == 200
        assert await status(20) == 413
        with account.hold("another") as held:
            held.add(3 * OUTCOME_BYTES)
            assert await status(4) == 429
            assert await status(1) == 200
        assert await status(4) == 200
        assert account.held_bytes == 0


async def test_an_outcome_of_a_stream_counts_until_it_is_read(pipelines: Sequence[PipelineFile]) -> None:
    headers = {"accept": "application/x-ndjson"}
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=pipelines) as served, served.client() as client:
        account = served.engine.memory.budget.outcomes
        account.limit_bytes = 6 * OUTCOME_BYTES
        answer = await client.post("/pipelines/vectors", json={"data": texts(20)}, headers=headers)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert len(lines) == 21, "more than fit at once, one after the other"
        assert account.held_bytes == served.engine.memory.budget.answers.held_bytes == 0
