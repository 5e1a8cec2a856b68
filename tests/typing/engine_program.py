"""A program with an engine, checked and never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
        labelled = await running.classify("a", candidate_labels=("b",), hypothesis_template="It is {}.")
        assert_type(labelled, staged_pool.ClassifyResult)
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
        assert_type(await running.encode(["a", "b"], batch_size=64, normalize_embeddings=True), NDArray[Any])
        assert_type(await running.encode_query("a", convert_to_tensor=True), Tensor)
        assert_type(await running.encode_document(["a"], convert_to_numpy=False), list[Tensor])
        await running.encode(["a"], precision="int4")  # type: ignore[call-overload]
        await running.predict([("a", "b")], convert_to_tensor=True)
        assert_type((await running.rank("a", ["b"], top_k=1))[0]["score"], float)
    yield
