"""Tiny models made by code, in the folder layouts that are found in the wild.

Weights are random but wide: a wrong mask, position, pooling or module order moves results by far more than rounding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, bert, save_body
from tests.models.tiny.classify import CLASSIFIERS, CROSS_ENCODERS, TOKEN_CLASSIFIERS
from tests.models.tiny.embedding import EMBEDDING
from tests.models.tiny.images import IMAGE_CLASSIFIERS, IMAGE_ENCODERS, TWO_TOWERS
from tests.models.tiny.layout import edit_json, pooling_flags, write_json, write_modules, write_prompts
from tests.models.tiny.multi_vector import MULTI_VECTOR
from tests.models.tiny.prompted import PROMPTED
from tests.models.tiny.sparse import SPARSE
from tests.models.tiny.vision_language import (
    ENGINE_PAGES,
    NAMED,
    OCR,
    PAGES,
    QWEN3_VL,
    SEEING,
    TILED_PAGES,
    VISION_LANGUAGE,
)
from tests.models.tiny.vocabularies import byte_bpe, chat_bpe, unigram, word_piece
from tests.needed import skip_below

KINDS = EMBEDDING
"""Embedding models of which a text is all that they are given."""

EVERY: Mapping[str, Body] = {
    **EMBEDDING,
    **PROMPTED,
    **CROSS_ENCODERS,
    **CLASSIFIERS,
    **TOKEN_CLASSIFIERS,
    **SPARSE,
    **MULTI_VECTOR,
    **TWO_TOWERS,
    **IMAGE_ENCODERS,
    **IMAGE_CLASSIFIERS,
    **VISION_LANGUAGE,
    **QWEN3_VL,
    **ENGINE_PAGES,
    **NAMED,
    **TILED_PAGES,
    **OCR,
}
"""Each kind of model that can be built, by name."""


NEEDS: Mapping[str, str] = {
    "colpali": "5.5",  # whose language model stands apart
    "nomic-matryoshka": "5.5",  # the first with NomicBertModel
    **dict.fromkeys(
        ("siglip2-naflex", "qwen2-vl", "qwen2.5-vl", "colqwen2", *QWEN3_VL, *ENGINE_PAGES, *NAMED, *TILED_PAGES, *OCR),
        "5.5",
    ),  # processors without torchvision
}
"""Kinds that the oldest transformers cannot make, by the first version that can."""


SHARED = "TINY_MODELS_OF_TESTS"
"""Variable of the folder in which the processes of a test run share models."""


def build(kind: str, folder: Path) -> Path:
    """Make the model `kind` in `folder`, which must not exist yet; skip the test where transformers is too old."""
    if kind in NEEDS:
        skip_below("transformers", NEEDS[kind], kind)
    shared = os.environ.get(SHARED)
    if shared and (made := Path(shared, kind)).exists():
        return Path(shutil.copytree(made, folder))
    folder.mkdir(parents=True)
    torch.manual_seed(7)
    EVERY[kind](folder)
    if shared:
        with suppress(OSError):  # another process was first
            Path(shutil.copytree(folder, Path(shared, f"{kind} of {os.getpid()}"))).rename(made)
    return folder


__all__ = [
    "CLASSIFIERS",
    "CROSS_ENCODERS",
    "EMBEDDING",
    "ENGINE_PAGES",
    "EVERY",
    "IMAGE_CLASSIFIERS",
    "IMAGE_ENCODERS",
    "KINDS",
    "MULTI_VECTOR",
    "NAMED",
    "OCR",
    "PAGES",
    "POSITIONS",
    "PROMPTED",
    "SEEING",
    "SPARSE",
    "TILED_PAGES",
    "TOKEN_CLASSIFIERS",
    "TWO_TOWERS",
    "VISION_LANGUAGE",
    "WIDTH",
    "bert",
    "build",
    "byte_bpe",
    "chat_bpe",
    "edit_json",
    "pooling_flags",
    "save_body",
    "unigram",
    "word_piece",
    "write_json",
    "write_modules",
    "write_prompts",
]
