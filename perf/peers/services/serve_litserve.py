"""LitServe with request batching, after its documentation ("Batching": `max_batch_size`, `batch_timeout`, `unbatch`).

One worker, for there is one device. Its limit of 30 s a request is raised, so that a slow cell is measured to its end.
"""

import argparse
import base64
import os
from typing import Any

import litserve as ls
import torch
from sentence_transformers import SentenceTransformer

MAX_BATCH_SIZE = 32
BATCH_TIMEOUT_S = 0.01
REQUEST_TIMEOUT_S = 120


class EmbeddingAPI(ls.LitAPI):
    """Answers a batch of requests, each with one or more texts."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(int(os.environ["PEER_THREADS"]))
        dtype = {"dtype": os.environ["PEER_DTYPE"]}
        self.model = SentenceTransformer(os.environ["PEER_MODEL"], device=device, model_kwargs=dtype)

    def decode_request(self, request: dict[str, Any], **_: Any) -> list[str]:
        texts: list[str] = request["input"]
        return texts

    def batch(self, inputs: list[list[str]]) -> list[list[str]]:
        return inputs

    def predict(self, x: list[list[str]], **_: Any) -> list[list[Any]]:
        vectors = iter(self.model.encode([text for texts in x for text in texts], show_progress_bar=False))
        return [[next(vectors) for _ in texts] for texts in x]

    def unbatch(self, output: list[list[Any]]) -> list[list[Any]]:
        return output

    def encode_response(self, output: list[Any], **_: Any) -> dict[str, Any]:
        return {
            "data": [{"index": i, "embedding": base64.b64encode(v.tobytes()).decode()} for i, v in enumerate(output)]
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    api = EmbeddingAPI(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S, api_path="/v1/embeddings")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=REQUEST_TIMEOUT_S)
    server.run(host="127.0.0.1", port=parser.parse_args().port, log_level="warning", generate_client_file=False)
