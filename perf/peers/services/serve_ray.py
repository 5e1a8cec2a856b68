"""Ray Serve with `@serve.batch`, after its documentation ("Dynamic Request Batching", "Performance Tuning").

One replica with all cores, for there is one device; `max_ongoing_requests` above the size of a batch, which would
otherwise never fill. The dashboard is left out: it is no part of serving.
"""

import argparse
import base64
import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

MAX_BATCH_SIZE = 32
BATCH_WAIT_S = 0.01
MAX_ONGOING_REQUESTS = 1000
THREADS = int(os.environ["PEER_THREADS"])


@serve.deployment(max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": THREADS})
class Embedding:
    """Answers a batch of requests, each with one or more texts."""

    def __init__(self) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(THREADS)
        dtype = {"dtype": os.environ["PEER_DTYPE"]}
        self.model = SentenceTransformer(os.environ["PEER_MODEL"], device="cpu", model_kwargs=dtype)

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_S)
    async def embed(self, requests: list[list[str]]) -> list[dict[str, Any]]:
        vectors = iter(self.model.encode([text for texts in requests for text in texts], show_progress_bar=False))
        return [
            {
                "data": [
                    {"index": index, "embedding": base64.b64encode(next(vectors).tobytes()).decode()}
                    for index in range(len(texts))
                ]
            }
            for texts in requests
        ]

    async def __call__(self, request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(await self.embed(body["input"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray then ends its own processes
    ray.init(num_cpus=THREADS, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Embedding.bind(), route_prefix="/v1/embeddings", blocking=True)  # type: ignore[attr-defined]  # the decorator adds it
