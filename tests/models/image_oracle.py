"""The right answers of models that read images and texts together, from transformers alone.

Image processor and tokenizer are loaded apart, because the processor that joins them asks for torchvision. Everything
is float32 on the CPU, and inputs go through a model one by one.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

Array: TypeAlias = NDArray[np.float32]
Part: TypeAlias = str | bytes
"""Part of a message: a text, or an encoded image."""


def conversation(
    folder: Path,
    messages: Sequence[tuple[str, Sequence[Part]]],
    *,
    system: str = "",
    add_generation_prompt: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Array:
    """The vector of the last token, of length 1: [width].

    Args:
        folder: Of a model of the family of Qwen2-VL.
        messages: The role of each, and its parts in order.
        system: A system message before them.
        add_generation_prompt: As in chat templates.
        options: Of the image processor.
    """
    hidden = _hidden(*tokens(folder, messages, system, add_generation_prompt, options), folder)
    return as_array(torch.nn.functional.normalize(hidden[-1], dim=-1))


def text(folder: Path, written: str) -> Array:
    """As `conversation`, of a text without a template."""
    ids = tokenizer_of(folder)(written, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = body_of(folder)(input_ids=ids).last_hidden_state[0]
    return as_array(torch.nn.functional.normalize(hidden[-1], dim=-1))


def tokens(
    folder: Path,
    messages: Sequence[tuple[str, Sequence[Part]]],
    system: str = "",
    add_generation_prompt: bool = False,
    options: Mapping[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ids [1, tokens], and what else the model is given for images."""
    structured: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for role, parts in messages:
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        structured.append({"role": role, "content": content})
    tokenizer = tokenizer_of(folder)
    written = tokenizer.apply_chat_template(structured, tokenize=False, add_generation_prompt=add_generation_prompt)
    shown = [part for _, parts in messages for part in parts if isinstance(part, bytes)]
    return _expanded(folder, written, shown, options)


def page(folder: Path, encoded: bytes, *, options: Mapping[str, Any] | None = None) -> Array:
    """Return a late interaction model's vectors of an image: [tokens, width], each of length 1."""
    model = _retriever(folder)
    if type(model).__name__.startswith("ColPali"):
        inputs = dict(_processor(folder)(images=[open_rgb(encoded)], return_tensors="pt"))
        inputs.pop("labels")
        with torch.inference_mode():
            return as_array(model(**inputs).embeddings[0])
    prompt = _processor(folder).visual_prompt_prefix
    ids, given = _expanded(folder, prompt, [encoded], options)
    # Left to itself this class of transformers 5.23 counts the tokens of an image like words, because it hands on
    # vectors without ids. The model was trained with rows and columns, which the class gave it when it was new.
    positions, _ = model.vlm.get_rope_index(ids, given["mm_token_type_ids"], given["image_grid_thw"])
    pixels = given["pixel_values"].unsqueeze(0)
    with torch.inference_mode():
        found = model(ids, position_ids=positions, pixel_values=pixels, image_grid_thw=given["image_grid_thw"])
    return as_array(found.embeddings[0])


def page_tokens(folder: Path, encoded: bytes) -> list[int]:
    """The ids that an image alone is read as."""
    processor = _processor(folder)
    if type(processor).__name__.startswith("ColPali"):
        ids = processor(images=[open_rgb(encoded)], return_tensors="pt")["input_ids"][0]
    else:
        ids = _expanded(folder, processor.visual_prompt_prefix, [encoded], None)[0][0]
    found: list[int] = ids.tolist()
    return found


def query(folder: Path, written: str) -> Array:
    """Return a late interaction model's vectors of a query: [tokens, width], each of length 1."""
    inputs = dict(_processor(folder)(text=[written], return_tensors="pt"))
    with torch.inference_mode():
        return as_array(_retriever(folder)(**inputs).embeddings[0])


def query_tokens(folder: Path, written: str) -> list[int]:
    ids: list[int] = _processor(folder)(text=[written], return_tensors="pt")["input_ids"][0].tolist()
    return ids


def positions(folder: Path, ids: Tensor, given: Mapping[str, Tensor]) -> NDArray[np.int64]:
    """Return the model's positions of tokens: in time, down and across, [3, tokens]."""
    found, _ = body_of(folder).get_rope_index(ids, given["mm_token_type_ids"], given["image_grid_thw"])
    where: NDArray[np.int64] = found[:, 0].numpy()
    return where


def _expanded(
    folder: Path, written: str, shown: Sequence[bytes], options: Mapping[str, Any] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    tokenizer = tokenizer_of(folder)
    if not shown:
        return tokenizer(written, return_tensors="pt")["input_ids"], {}
    processor = image_processor_of(folder)
    with warnings.catch_warnings(action="ignore"):  # min_pixels and max_pixels are to be written otherwise some day
        pixels = processor(images=[open_rgb(encoded) for encoded in shown], return_tensors="pt", **(options or {}))
    before, *rest = written.split("<|image_pad|>")
    for grid, after in zip(pixels["image_grid_thw"], rest, strict=True):
        before += "<|image_pad|>" * (int(grid.prod()) // processor.merge_size**2) + after
    ids = tokenizer(before, return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return ids, {
        "mm_token_type_ids": kinds,
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": pixels["image_grid_thw"],
    }


def _hidden(ids: Tensor, given: Mapping[str, Tensor], folder: Path) -> Tensor:
    with torch.inference_mode():
        hidden: Tensor = body_of(folder)(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state
    return hidden[0]


def open_rgb(encoded: bytes) -> Image.Image:
    """Decode an image, in colours."""
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def as_array(values: Tensor) -> Array:
    """Convert a tensor to float32."""
    found: Array = values.float().numpy()
    return found


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(str(folder))


@functools.cache
def image_processor_of(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(str(folder), backend="pil")


@functools.cache
def _processor(folder: Path) -> Any:
    return hf.AutoProcessor.from_pretrained(str(folder))


@functools.cache
def body_of(folder: Path) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        return hf.AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()


@functools.cache
def _retriever(folder: Path) -> Any:
    torch.set_num_threads(1)
    name = hf.AutoConfig.from_pretrained(str(folder)).architectures[0]
    with warnings.catch_warnings(action="ignore"):
        return getattr(hf, name).from_pretrained(str(folder), dtype=torch.float32).eval()
