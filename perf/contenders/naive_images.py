"""A naive server of images: FastAPI, Pillow and transformers, with the forward inside `async def`.

Run by the `liveness --images` command; needs the `perf` extra.
"""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import uvicorn
from fastapi import FastAPI
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel


def create_app(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> FastAPI:
    """Load the model and return the application, which answers the requests of the load.

    Args:
        folder: Folder of the model.
        dtype: Data type of the weights.
        trust_remote_code: Run the folder's own image processor, if it has one.
    """
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = CLIPModel.from_pretrained(folder, dtype=dtype).eval()
    app = FastAPI()

    def embed(encoded: list[str]) -> torch.Tensor:
        images = [Image.open(BytesIO(base64.b64decode(text))).convert("RGB") for text in encoded]
        with torch.inference_mode():
            pixels = processor(images, return_tensors="pt")["pixel_values"].to(dtype)
            pooled = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
            return torch.nn.functional.normalize(pooled.float())

    @app.get("/health")
    async def health() -> None:
        return None

    @app.post("/v1/embeddings")
    async def embeddings(body: dict[str, Any]) -> dict[str, Any]:
        vectors = embed([given["image"] for given in body["input"]]).numpy()
        return {
            "data": [{"index": i, "embedding": base64.b64encode(v.tobytes()).decode()} for i, v in enumerate(vectors)]
        }

    @app.post("/score")
    async def score(body: dict[str, Any]) -> dict[str, Any]:
        urls = [document["content"][0]["image_url"]["url"] for document in body["documents"]]
        vectors = embed([url.partition(",")[2] for url in urls])
        with torch.inference_mode():
            tokens = tokenizer([body["queries"]], return_tensors="pt", truncation=True)
            text = model.text_projection(model.text_model(**tokens).pooler_output)
            scores = vectors @ torch.nn.functional.normalize(text.float())[0]
        return {"data": [{"index": index, "score": value} for index, value in enumerate(scores.tolist())]}

    return app


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the model.")],
    dtype: Annotated[str, typer.Option(help="Data type of the weights, as a torch name.")],
    torch_threads: Annotated[int, typer.Option(help="Threads of one forward.")],
    trust_remote_code: Annotated[bool, typer.Option(help="Run the folder's own image processor.")] = False,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")],
) -> None:
    """Serve until a signal."""
    torch.set_num_threads(torch_threads)
    app = create_app(folder, getattr(torch, dtype), trust_remote_code=trust_remote_code)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
