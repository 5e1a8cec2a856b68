"""Checked by mypy, never run: the types that users of the library see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import staged_pool


async def program() -> AsyncIterator[None]:
    opened = staged_pool.open_engine(staged_pool.EngineConfig(model="folder"))
    engine: AbstractAsyncContextManager[staged_pool.Engine] = opened
    async with engine as running:
        assert_type(running, staged_pool.Engine)
        result = await running.embed(["a query", "a passage"], dimensions=2, timeout_s=1.0)
        assert_type(result, staged_pool.EmbedResult)
        assert_type(result.embeddings, NDArray[np.float32])
        assert_type(result.usage.prompt_tokens, int)
        assert_type(result.sparse, tuple[staged_pool.SparseVector, ...] | None)
        assert_type(await running.classify([("a", "b")]), staged_pool.ClassifyResult)
        assert_type(await running.score("query", ["a", "b"]), staged_pool.ScoreResult)
        assert_type((await running.rerank("query", ["a"], top_n=1)).ranking, tuple[staged_pool.Ranked, ...])
        image = staged_pool.Image(b"the bytes of a file", options={"do_resize": False})
        chat = staged_pool.Chat(({"role": "user", "content": ("what is this?", image)},))
        assert_type(await running.embed(image), staged_pool.EmbedResult)
        assert_type(await running.embed(["a", image, chat, [1, 2]]), staged_pool.EmbedResult)
        assert_type(await running.score(image, ["a", chat]), staged_pool.ScoreResult)
        assert_type(running.card, staged_pool.ModelCard)
        assert_type(running.statistics(), staged_pool.EngineStatistics)
        request = staged_pool.EmbedRequest(inputs=(staged_pool.TextInput("text"),))

        def encode(result: staged_pool.EmbedResult) -> bytes:
            return result.embeddings.tobytes()

        assert_type(await running.submit(lambda: request, encode), bytes)
    yield


def blocking_program() -> None:
    with staged_pool.Client("http://127.0.0.1:8000", retry=staged_pool.RetryPolicy(retries=1)) as client:
        assert_type(client, staged_pool.Client)
        assert_type(client.embed("a", outputs=["dense", "sparse"]), staged_pool.EmbedResult)
        client.embed("a", output="dense")  # type: ignore[call-arg]
        client.embed("a", dimensions="8")  # type: ignore[arg-type]
        assert_type(client.rerank("query", ["a"]).ranking, tuple[staged_pool.Ranked, ...])
        with client.embed_stream(["a", "b"], timeout_s=1.0) as stream:
            for index, vector in stream:
                assert_type(index, int)
                assert_type(vector, NDArray[np.float32])
            assert_type(stream.usage, staged_pool.Usage | None)


async def asking_program() -> None:
    async with staged_pool.AsyncClient(unix_socket="/run/pool", api_key="key") as client:
        assert_type(client, staged_pool.AsyncClient)
        assert_type(await client.score(["a"], ["b"]), staged_pool.ScoreResult)
        await client.classify("a", labels=3)  # type: ignore[call-arg]
        assert_type(await client.classify([("a", "b")]), staged_pool.ClassifyResult)
        async with client.embed_stream(["a", "b"]) as stream:
            async for _, vector in stream:
                assert_type(vector, NDArray[np.float32])
