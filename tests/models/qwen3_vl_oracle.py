"""The right answers of Qwen3-VL models: the authors' prompts by hand, and the classes of transformers.

Positions of images are those of `get_rope_index`. Inputs go through a model one by one, in float32 on the CPU.
"""

from __future__ import annotations

import functools
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tests.models.image_oracle import Array, Part, as_array, open_rgb

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PIXELS = {"shortest_edge": 4 * 32 * 32, "longest_edge": 1800 * 32 * 32}
"""Limits of the authors' script."""


def embedding_prompt(parts: Sequence[Part], instruction: str = "") -> str:
    """Return the authors' text of an input: parts stand as they are given."""
    system = instruction.strip()
    if system and not unicodedata.category(system[-1]).startswith("P"):
        system += "."
    content = "".join(part if isinstance(part, str) else IMAGE for part in parts) or "NULL"
    system = system or "Represent the user's input."
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def embed(folder: Path, parts: Sequence[Part], instruction: str = "") -> Array:
    """Return the vector of texts and images, of length 1: [width]."""
    prompt = embedding_prompt(parts, instruction)
    return vector(folder, prompt, [part for part in parts if isinstance(part, bytes)], PIXELS)


def vector(folder: Path, prompt: str, images: Sequence[bytes], size: dict[str, int] | None) -> Array:
    """Return the last token's vector of a prompt, of length 1. `size`: limits of the image processor."""
    hidden = last_hidden(folder, *tokens(folder, prompt, images, size))
    return as_array(torch.nn.functional.normalize(hidden[-1], dim=-1))


def tokens(
    folder: Path, prompt: str, images: Sequence[bytes], size: dict[str, int] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the ids, [1, tokens], and what else the model is given for images."""
    tokenizer = tokenizer_of(folder)
    if not images:
        return tokenizer(prompt, return_tensors="pt")["input_ids"], {}
    more = {} if size is None else {"size": size}
    pixels = processor_of(folder)(images=[open_rgb(image) for image in images], return_tensors="pt", **more)
    written, *rest = prompt.split("<|image_pad|>")
    for grid, after in zip(pixels["image_grid_thw"], rest, strict=True):
        written += "<|image_pad|>" * (int(grid.prod()) // 4) + after
    ids = tokenizer(written, return_tensors="pt")["input_ids"]
    return ids, {
        "mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int(),
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": pixels["image_grid_thw"],
    }


def last_hidden(folder: Path, ids: Tensor, given: dict[str, Tensor], *, deepstack: bool = True) -> Tensor:
    """Return the last layer's vectors: [tokens, width]. `deepstack`: add the images' vectors to inner layers."""
    model = body(folder)
    with torch.inference_mode():
        if deepstack:
            found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0]
            return found
        grid = given["image_grid_thw"]
        seen = model.get_image_features(given["pixel_values"], grid).pooler_output
        embedded = model.get_input_embeddings()(ids)
        embedded[given["mm_token_type_ids"].bool()] = torch.cat(seen)
        positions, _ = model.get_rope_index(ids, given["mm_token_type_ids"], grid)
        alone: Tensor = model.language_model(inputs_embeds=embedded, position_ids=positions).last_hidden_state[0]
        return alone


@functools.cache
def body(folder: Path) -> Any:
    """Return `Qwen3VLModel` of a folder."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        return hf.AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(str(folder))


@functools.cache
def processor_of(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(str(folder), backend="pil")
