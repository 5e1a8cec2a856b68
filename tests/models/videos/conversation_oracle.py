"""The right vectors of conversations with videos: parts of transformers' model, and positions by the paper's rule.

transformers 5.23 itself places a text behind a video as if it were an image, so it is no oracle of whole conversations
(https://github.com/huggingface/transformers/issues/45381). Here its parts run one by one: the token embedding, the
image encoder, and the language model with explicit positions. Everything is float32, and inputs run one by one.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.models import image_oracle
from tests.models.videos import processor_oracle

Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Still:
    """An encoded image."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Moving:
    """Chosen frames of a video, and how many of them are a second."""

    frames: list[NDArray[np.uint8]]
    rate: float


Part: TypeAlias = "str | Still | Moving"


def decode(data: bytes) -> list[NDArray[np.uint8]]:
    """All frames of a file, one after the other."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def conversation(folder: Path, parts: Sequence[Part]) -> Array:
    """The vector of one message of a user, of length 1: [width]."""
    tokenizer, body = image_oracle.tokenizer_of(folder), image_oracle.body_of(folder)
    config = body.config
    kinds = {Still: "image", Moving: "video"}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kinds[type(part)]} for part in parts
    ]
    written = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    marks = {"<|image_pad|>": 0, "<|video_pad|>": 0}
    shown = [_pixels(folder, part) for part in parts if not isinstance(part, str)]
    pieces: list[str] = []
    left = iter(shown)
    for piece in _split(written, [*marks]):
        if piece in marks:
            grid = next(left)[1]
            piece = piece * (grid[0] * grid[1] * grid[2] // 4)  # noqa: PLW2901
        pieces.append(piece)
    ids = tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
    seen = (ids == config.image_token_id) | (ids == config.video_token_id)
    with torch.inference_mode():
        embeds = body.get_input_embeddings()(ids)
        if shown:
            found = [_features(body, *each) for each in shown]
            embeds = embeds.masked_scatter(seen[..., None].expand_as(embeds), torch.cat(found).to(embeds.dtype))
        where = torch.from_numpy(positions(ids[0].tolist(), shown, config))[:, None]
        hidden = body.language_model(
            inputs_embeds=embeds, position_ids=where, attention_mask=torch.ones_like(ids)
        ).last_hidden_state[0, -1]
    made: Array = torch.nn.functional.normalize(hidden, dim=-1).numpy()
    return made


Shown: TypeAlias = tuple[Tensor, tuple[int, int, int], float | None]


def positions(ids: Sequence[int], shown: Sequence[Shown], config: Any) -> NDArray[np.int64]:
    """Positions of tokens by the rule of the paper: text goes on behind the largest position of all three axes."""
    per_second = getattr(config.vision_config, "tokens_per_second", None)
    found: list[tuple[int, int, int]] = []
    left = iter(shown)
    place = 0
    while place < len(ids):
        after = max((max(each) for each in found), default=-1) + 1
        if ids[place] not in (config.image_token_id, config.video_token_id):
            found.append((after, after, after))
            place += 1
            continue
        _, (steps, high, wide), seconds = next(left)
        for step in range(steps):
            time = step
            if per_second is not None and seconds is not None:
                time = int(np.float32(step) * np.float32(per_second * seconds))
            places = itertools.product(range(high // 2), range(wide // 2))
            found += [(after + time, after + row, after + column) for row, column in places]
        place += steps * high * wide // 4
    return np.array(found).T.astype(np.int64)


def _pixels(folder: Path, part: Still | Moving) -> Shown:
    processor = image_oracle.image_processor_of(folder)
    if isinstance(part, Still):
        made = processor(images=[image_oracle.open_rgb(part.data)], return_tensors="pt")
        grid = [int(edge) for edge in made["image_grid_thw"][0]]
        return made["pixel_values"], (grid[0], grid[1], grid[2]), None
    height, width = part.frames[0].shape[:2]
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    size = processor_oracle.size("qwen2_vl", len(part.frames), height, width, factor=28, least=least, most=most)
    flat, shape = processor_oracle.patches(list(part.frames), *size)
    values = 2 * 14 * 14
    mean, std = (torch.tensor(each).repeat_interleave(values) for each in (processor.image_mean, processor.image_std))
    return (flat.float() / 255 - mean) / std, shape, 2 / part.rate


def _features(body: Any, pixels: Tensor, grid: tuple[int, int, int], seconds: float | None) -> Tensor:
    found = body.get_video_features if seconds is not None else body.get_image_features
    vectors = found(pixels, torch.tensor([grid])).pooler_output
    return vectors if isinstance(vectors, Tensor) else torch.cat(list(vectors))


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Split a text before and behind each mark."""
    pieces = [text]
    for mark in marks:
        pieces = [
            part
            for piece in pieces
            for number, words in enumerate(piece.split(mark))
            for part in ([mark, words] if number else [words])
        ]
    return pieces
