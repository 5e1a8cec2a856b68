"""PaddleOCR-VL gives the vector of a conversation's last token, as transformers computes it."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image as Pillow
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, Output, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.plan import plan
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, as_array
from tests.models.requests import prepare

EXACT = 1e-4
WIDE, TALL, SMALL = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 17, "PNG", 3)
CONVERSATIONS: list[list[str | bytes]] = [
    [WIDE, "OCR:"],
    [TALL],
    ["no image"],
    [SMALL, WIDE, "Table Recognition:"],
    [SMALL],
]


@functools.cache
def parts(folder: Path) -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        model = hf.PaddleOCRVLForConditionalGeneration.from_pretrained(folder).eval()
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return model, hf.AutoTokenizer.from_pretrained(folder), processor


def vector(folder: Path, content: Sequence[str | bytes]) -> Array:
    """The last token's vector of the class with answers, of length 1."""
    model, tokenizer, processor = parts(folder)
    structured = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    written = tokenizer.apply_chat_template([{"role": "user", "content": structured}], tokenize=False)
    shown = [Pillow.open(io.BytesIO(part)).convert("RGB") for part in content if isinstance(part, bytes)]
    given: dict[str, Any] = {}
    if shown:
        pixels = processor(images=shown, return_tensors="pt")
        before, *rest = written.split("<|IMAGE_PLACEHOLDER|>")
        for grid, after in zip(pixels["image_grid_thw"], rest, strict=True):
            before += "<|IMAGE_PLACEHOLDER|>" * (int(grid.prod()) // 4) + after
        written, given = before, dict(pixels)
    ids = tokenizer(written, return_tensors="pt")["input_ids"]
    if shown:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    model.model.rope_deltas = None
    with torch.inference_mode():
        hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0, -1]
    return as_array(torch.nn.functional.normalize(hidden, dim=-1))


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_conversations_have_the_oracles_vectors(attention: Any, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("paddleocr-vl")
    model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention, task="embed"))
    assert model.card.attention == attention
    wanted = [vector(folder, content) for content in CONVERSATIONS]
    assert min(np.abs(a - b).max() for i, a in enumerate(wanted) for b in wanted[:i]) > 100 * EXACT
    inputs = tuple(
        TextInput(
            Chat(({"role": "user", "content": tuple(Image(p) if isinstance(p, bytes) else p for p in content)},)),
            add_special_tokens=False,
        )
        for content in CONVERSATIONS
    )
    request = EmbedRequest(inputs=inputs, outputs=frozenset({Output.DENSE}))
    prepared = prepare(model, request)
    for together in (True, False):
        rows: list[Any] = [None] * len(inputs)
        groups: dict[Any, list[int]] = {}
        for place, each in enumerate(prepared):
            groups.setdefault((each.batch_key, together or place), []).append(place)
        for places in groups.values():
            for place, row in zip(places, model.forward([prepared[p].payload for p in places]), strict=True):
                rows[place] = row
        result = plan(request, model.card).finish(rows, 1)
        assert isinstance(result, EmbedResult)
        assert result.dense is not None
        assert max(np.abs(ours - theirs).max() for ours, theirs in zip(result.dense, wanted, strict=True)) < EXACT
