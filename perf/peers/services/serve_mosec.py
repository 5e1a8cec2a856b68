"""mosec with dynamic batching, after its documentation ("Embedding Service", "Interface": `append_worker`).

One worker, for there is one device; batches of up to 32 requests, and its own default of 10 ms to wait for them.
mosec reads `--port` and the MOSEC_* variables by itself.
"""

import base64
import os
from typing import Any

import torch
from mosec import Server, Worker
from sentence_transformers import SentenceTransformer

MAX_BATCH_SIZE = 32
MAX_WAIT_MS = 10


class Embedding(Worker):
    """Answers a batch of requests, each with one or more texts."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(int(os.environ["PEER_THREADS"]))
        dtype = {"dtype": os.environ["PEER_DTYPE"]}
        self.model = SentenceTransformer(os.environ["PEER_MODEL"], device="cpu", model_kwargs=dtype)

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        vectors = iter(self.model.encode([text for body in data for text in body["input"]], show_progress_bar=False))
        return [
            {
                "data": [
                    {"index": index, "embedding": base64.b64encode(next(vectors).tobytes()).decode()}
                    for index in range(len(body["input"]))
                ]
            }
            for body in data
        ]


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Embedding, num=1, max_batch_size=MAX_BATCH_SIZE, max_wait_time=MAX_WAIT_MS, route="/v1/embeddings"
    )
    server.run()
