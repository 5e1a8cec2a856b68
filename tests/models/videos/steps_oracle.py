"""The right inputs of Qwen3-VL models with videos: a prompt by hand, and the rules of transformers' own source.

Frames, sizes, times and patches come from the processor's functions. `Qwen3VLModel` finds positions and adds the inner
layers' vectors itself, for one input at a time, in float32 on the CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tests.models import qwen3_vl_oracle
from tests.models.image_oracle import open_rgb
from tests.models.videos import processor_oracle
from tests.models.videos.conversation_oracle import decode

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True)
class Moving:
    """An encoded video, its true frames a second, and options of the processor."""

    data: bytes
    rate: float
    options: dict[str, Any] = field(default_factory=dict)
    turned: bool = False
    """Frames come in reverse order."""


Seen: TypeAlias = bytes | Moving


def written(parts: Sequence[str | Seen]) -> str:
    """Return parts as a template writes them."""
    marks = {bytes: qwen3_vl_oracle.IMAGE, Moving: VIDEO}
    return "".join(part if isinstance(part, str) else marks[type(part)] for part in parts)


def tokens(
    folder: Path, prompt: str, shown: Sequence[Seen], size: dict[str, int] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the ids, [1, tokens], and what else the model is given. `size`: limits of images."""
    tokenizer = qwen3_vl_oracle.tokenizer_of(folder)
    pads = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    left = iter(shown)
    found: dict[str, list[tuple[Tensor, list[int]]]] = {"image": [], "video": []}
    pieces: list[str] = []
    for piece in re.split(f"({re.escape(VIDEO)}|{re.escape(pads['image'])})", prompt):
        if piece == VIDEO:
            clip = next(left)
            assert isinstance(clip, Moving)
            values, grid, times = _clip(folder, clip)
            found["video"].append((values, grid))
            step = VIDEO.replace(pads["video"], pads["video"] * (grid[1] * grid[2] // 4))
            pieces += [f"<{time:.1f} seconds>{step}" for time in times]
        elif piece == pads["image"]:
            image = next(left)
            assert isinstance(image, bytes)
            more = {} if size is None else {"size": size}
            made = qwen3_vl_oracle.processor_of(folder)(images=[open_rgb(image)], return_tensors="pt", **more)
            found["image"].append((made["pixel_values"], made["image_grid_thw"][0].tolist()))
            pieces.append(pads["image"] * (int(made["image_grid_thw"].prod()) // 4))
        else:
            pieces.append(piece)
    ids = tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
    image, video = (ids == tokenizer.convert_tokens_to_ids(pad) for pad in pads.values())
    given = {"mm_token_type_ids": image.int() + 2 * video.int()}
    for kind, values_name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if found[kind]:
            given[values_name] = torch.cat([values for values, _ in found[kind]])
            given[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in found[kind]])
    return ids, given


def _clip(folder: Path, clip: Moving) -> tuple[Tensor, list[int], list[float]]:
    frames = decode(clip.data)
    options = dict(clip.options)
    limits = json.loads((folder / "video_preprocessor_config.json").read_text())["size"]
    if options.pop("do_sample_frames", True):
        indices = processor_oracle.frames("qwen3_vl", len(frames), clip.rate, **(options or {"fps": 2.0}))
    else:
        indices = [*range(len(frames))]
    chosen = [frames[index] for index in indices]
    size = processor_oracle.size(
        "qwen3_vl",
        len(chosen),
        *chosen[0].shape[:2],
        factor=32,
        least=limits["shortest_edge"],
        most=limits["longest_edge"],
    )
    flat, grid = processor_oracle.patches(chosen[::-1] if clip.turned else chosen, *size, patch=16)
    times = processor_oracle.times(indices, clip.rate)
    return (flat.float() / 255 - 0.5) / 0.5, [*grid], [float(np.float64(time)) for time in times]
