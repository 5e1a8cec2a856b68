"""A naive server: FastAPI and transformers in thirty lines, with the forward inside `async def`.

It has the same weights, data type, threads and answers as the server that it is compared with. Batches are padded, one
request at a time. Run by the `liveness` command; needs the `perf` extra.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer


class EmbeddingsBody(BaseModel):
    """The fields that the load uses."""

    input: list[str]
    encoding_format: str = "base64"


def create_app(folder: Path, dtype: torch.dtype, max_tokens: int) -> FastAPI:
    """The application, its model loaded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    app = FastAPI()

    @app.get("/health")
    async def health() -> None:
        return None

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody) -> dict[str, Any]:
        tokens = tokenizer(body.input, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"].unsqueeze(-1)
            means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors = torch.nn.functional.normalize(means).numpy()
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": base64.b64encode(vector.tobytes()).decode()}
                for index, vector in enumerate(vectors)
            ],
        }

    return app


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the model.")],
    dtype: Annotated[str, typer.Option(help="Data type of the weights, as a torch name.")],
    torch_threads: Annotated[int, typer.Option(help="Threads of one forward.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens; longer texts are truncated.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")],
) -> None:
    """Serve until a signal."""
    torch.set_num_threads(torch_threads)
    app = create_app(folder, getattr(torch, dtype), max_tokens)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
