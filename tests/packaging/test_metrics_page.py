"""docs/metrics.md has every metric that a server answers, and nothing else."""

from __future__ import annotations

import re

import pytest
from blockbuster import BlockBuster

from tests.packaging.metrics_page import PAGE, families, page

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


async def test_the_page_is_up_to_date(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    found = await families()
    text = PAGE.read_text()
    assert page(text, found) == text, "run `python -m tests.packaging.metrics_page`"


async def test_metrics_that_the_text_names_exist(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()
    known = {sample.name for family in await families() for sample in family.samples}
    named = set(re.findall(r"\bstaged_pool_\w+", PAGE.read_text()))
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known} | known
    assert named <= bases


async def test_every_metric_has_few_samples(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()
    assert sum(len(family.samples) for family in await families()) < 1500
