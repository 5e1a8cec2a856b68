"""Rules of transformers' video processors, read from its own source.

The modules of the processors import torchvision, which CPU builds of torch rarely have beside them. Their functions for
frames, sizes and patches need torch alone. So each is compiled from the source by itself.
"""

from __future__ import annotations

import ast
import itertools
import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "num_frames": None,
    "fps": None,
    "min_frames": 4,
    "max_frames": 768,
    "temporal_patch_size": 2,
}


@cache
def _functions(model: str, module: str) -> dict[str, Any]:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models" / model / f"{module}_{model}.py"
    tree = ast.parse(path.read_text())
    kept: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _NAMES:
            node.decorator_list, node.returns = [], None
            for each in (*node.args.args, *node.args.kwonlyargs):
                each.annotation = None
            if node.args.kwarg:
                node.args.kwarg.annotation = None
            kept.append(node)
    names: dict[str, Any] = {"math": math, "np": np, "torch": torch, "itertools": itertools, "logger": _Silent()}
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)
    return names


class _Silent:
    def warning_once(self, message: str) -> None: ...


_NAMES = {"smart_resize", "sample_frames", "patchify", "_calculate_timestamps"}


def frames(model: str, total: int, rate: float | None, **options: Any) -> list[int]:
    """Indices that the processor of a model chooses, or raises its error."""
    processor = SimpleNamespace(**DEFAULTS)
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    found = _functions(model, "video_processing")["sample_frames"](processor, metadata=metadata, **options)
    return [int(index) for index in found]


def size(model: str, count: int, height: int, width: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width of a frame after resizing."""
    resize = _functions(model, "video_processing")["smart_resize"]
    options = {"factor": factor, "min_pixels": least, "max_pixels": most}
    found = resize(count, height, width, **options) if model == "qwen3_vl" else resize(height, width, **options)
    return int(found[0]), int(found[1])


def times(indices: list[int], rate: float) -> list[float]:
    """Times of the steps of Qwen3-VL."""
    found: list[float] = _functions("qwen3_vl", "processing")["_calculate_timestamps"](None, [*indices], rate)
    return found


def patches(
    given: list[Any], height: int, width: int, patch: int = 14, merge: int = 2
) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches of Qwen2-VL as bytes, and their grid."""
    video = torch.stack([torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1) for frame in given])
    if video.shape[-2:] != (height, width):
        # `torchvision.transforms.v2.functional.resize` calls this for tensors of bytes.
        video = torch.nn.functional.interpolate(video, (height, width), mode="bicubic", antialias=True)
    flat, *grid = _functions("qwen2_vl", "video_processing")["patchify"](None, video[None], patch, merge, 2)
    return flat[0], (grid[0], grid[1], grid[2])
