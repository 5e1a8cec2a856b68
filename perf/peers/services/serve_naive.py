"""FastAPI and sentence-transformers, as one writes it first: inline in `async def`, or in FastAPI's threadpool.

FastAPI's documentation, "Concurrency and async / await": a handler that is a plain `def` runs in a threadpool.
"""

import argparse
import base64
import os
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class EmbeddingsBody(BaseModel):
    """The fields that the load uses."""

    input: list[str]


def create_app(*, threadpool: bool) -> FastAPI:
    """The application, its model loaded."""
    torch.set_num_threads(int(os.environ["PEER_THREADS"]))
    dtype = {"dtype": os.environ["PEER_DTYPE"]}
    device = os.environ.get("PEER_DEVICE", "cpu")
    model = SentenceTransformer(os.environ["PEER_MODEL"], device=device, model_kwargs=dtype)
    app = FastAPI()

    def embed(texts: list[str]) -> dict[str, Any]:
        vectors = model.encode(texts, show_progress_bar=False)
        return {
            "data": [{"index": i, "embedding": base64.b64encode(v.tobytes()).decode()} for i, v in enumerate(vectors)]
        }

    @app.get("/health")
    async def health() -> None:
        return None

    if threadpool:

        @app.post("/v1/embeddings")
        def embeddings_in_thread(body: EmbeddingsBody) -> dict[str, Any]:
            return embed(body.input)

    else:

        @app.post("/v1/embeddings")
        async def embeddings_inline(body: EmbeddingsBody) -> dict[str, Any]:
            return embed(body.input)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threadpool", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    application = create_app(threadpool=arguments.threadpool)
    uvicorn.run(application, host="127.0.0.1", port=arguments.port, log_level="warning")
