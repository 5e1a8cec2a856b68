"""A user's program with a pipeline, for type checkers."""

from __future__ import annotations

import staged_pool


def shorten(text: str) -> str:
    return text[:100]


async def search(engine: staged_pool.Engine, query: str, passages: list[str]) -> list[tuple[int, float]]:
    pipeline = staged_pool.Pipeline(
        [
            shorten,
            staged_pool.PipelineStage("embed", engine=engine, outputs=["multi_vector"], on_error="skip"),
            staged_pool.PipelineStage(
                "topic", engine=engine, task="classify", source="item", candidate_labels=("a", "b")
            ),
            staged_pool.PipelineStage("words", engine=engine, source="item", outputs="sparse", max_active_dims=64),
            staged_pool.PipelineStage("rerank", task="maxsim", source=["request.query", "embed"], top_k=3),
        ],
        window=32,
    )
    result: staged_pool.PipelineResult = await pipeline.submit({"query": query, "data": passages}, timeout_s=10)
    error: staged_pool.StagedPoolError | None = result.errors[0].error if result.errors else None
    async with pipeline.stream({"query": query, "data": passages}, priority="bulk", tenant="me") as outcomes:
        async for outcome in outcomes:
            if isinstance(outcome, staged_pool.ItemError):
                error = outcome.error
    in_flight: int = pipeline.statistics().in_flight
    print(error, in_flight)
    return [(item.index, item.value) for item in result.items]
