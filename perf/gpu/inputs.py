"""Inputs of the checks of a device: texts, pairs and images, always the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pydoc_data.topics import topics
from typing import Final

import numpy as np

from staged_pool.runtime.card import Lane
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import MODEL_MAX, Image, Output, Outputs, PairInput, TextInput

_WORDS: Final = (40, 1, 12, 60, 3, 25, 8, 90)
"""Words of each text. Longer ones stand between shorter ones, so that a replay follows one with more tokens."""

_PIXELS: Final = ((640, 480), (120, 90), (64, 200), (37, 53))
"""Width and height of each image, in pixels."""

_COARSE: Final = 8
"""Edge of the random pixels that an image is scaled from."""

_SEED: Final = 11


def inputs_of(lane: Lane, outputs: Outputs) -> list[ModelInput]:
    """Return the inputs of a lane: images, or texts of varied lengths, or pairs of texts for a cross-encoder."""
    if lane == "image":
        return [ModelInput(Image(image), outputs) for image in images()]
    texts = texts_of(_WORDS)
    if Output.LABELS in outputs:
        pairs = zip(texts[1:] + texts[:1], texts, strict=True)
        return [ModelInput(PairInput(first=a, second=b, max_tokens=MODEL_MAX), outputs) for a, b in pairs]
    return [
        ModelInput(TextInput(text, max_tokens=MODEL_MAX), outputs, role="query" if place % 2 else "document")
        for place, text in enumerate(texts)
    ]


def texts_of(words: Sequence[int], seed: int = _SEED) -> list[str]:
    """Return texts of random words, with these numbers of words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_vocabulary(), k=count)) for count in words]


@cache
def _vocabulary() -> Sequence[str]:
    """Return the words of Python's documentation, sorted."""
    return sorted({word for text in topics.values() for word in text.split() if word.isalpha()})


def images() -> list[bytes]:
    """Return PNG files of several sizes."""
    from PIL import Image as Pillow

    draw = np.random.default_rng(_SEED)
    files = []
    for size in _PIXELS:
        coarse = draw.integers(256, size=(_COARSE, _COARSE, 3), dtype=np.uint8)
        file = BytesIO()
        Pillow.fromarray(coarse).resize(size, Pillow.Resampling.BICUBIC).save(file, "PNG")
        files.append(file.getvalue())
    return files
