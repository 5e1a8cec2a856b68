"""Programs that ask a server, checked and never run."""

from __future__ import annotations

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import staged_pool


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
        assert_type(await client.classify("a", candidate_labels="b, c"), staged_pool.ClassifyResult)
        assert_type(await client.classify([("a", "b")]), staged_pool.ClassifyResult)
        async with client.embed_stream(["a", "b"]) as stream:
            async for _, vector in stream:
                assert_type(vector, NDArray[np.float32])
