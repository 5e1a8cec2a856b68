"""Generated images, and a CLIP of the size of ViT-B/32 with random weights.

Random weights take the same time as trained ones. The images are smooth noise with a little grain, so that they have
about the JPEG size and decoding time of photographs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Final, Literal

import numpy as np

from perf.tools.client import post

Size = Literal["vga", "1080p"]

SIZES: Final[dict[Size, tuple[int, int]]] = {"vga": (640, 480), "1080p": (1920, 1080)}
"""Width and height in pixels, by name."""

_QUALITY: Final = 90
_COARSE: Final = 40
"""Pixels between the points of the smooth noise."""
_GRAIN: Final = 4.0
"""Standard deviation of the grain, on a scale of 255."""


def jpeg(size: Size, seed: int) -> bytes:
    """Return an encoded image, a different one for each seed."""
    from PIL import Image

    width, height = SIZES[size]
    random = np.random.default_rng(seed)
    coarse = random.integers(256, size=(height // _COARSE, width // _COARSE, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grained = smooth + random.normal(0.0, _GRAIN, smooth.shape).astype(np.float32)
    file = BytesIO()
    Image.fromarray(grained.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def embedding_request(images: Iterable[bytes]) -> bytes:
    """Return a complete request for the vectors of images."""
    given = [{"image": base64.b64encode(image).decode()} for image in images]
    return post("/v1/embeddings", json.dumps({"input": given, "encoding_format": "base64"}).encode())


def score_request(query: str, images: Iterable[bytes]) -> bytes:
    """Return a complete request for the scores of images for a text."""
    urls = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in images]
    documents = [{"content": [{"type": "image_url", "image_url": {"url": url}}]} for url in urls]
    return post("/score", json.dumps({"queries": query, "documents": documents}).encode())


@contextmanager
def clip_folder(layers: int | None = None) -> Iterator[Path]:
    """Make the folder of the model; it is removed at the end of the block.

    Args:
        layers: Layers of each tower. None: those of ViT-B/32.
    """
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    with TemporaryDirectory(prefix="perf-clip-") as name:
        folder = Path(name)
        words = write_word_tokenizer(folder, begin="<|startoftext|>", end="<|endoftext|>", longest=77)
        config = CLIPConfig()
        if layers is not None:
            config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = layers
        config.text_config.vocab_size = words
        config.text_config.bos_token_id, config.text_config.eos_token_id = words - 2, words - 1
        torch.manual_seed(0)
        CLIPModel(config).to(torch.bfloat16).save_pretrained(folder)
        CLIPImageProcessorPil().save_pretrained(folder)
        yield folder


def write_word_tokenizer(folder: Path, *, begin: str, end: str, longest: int, others: Sequence[str] = ()) -> int:
    """Write a tokenizer of the words of Python's documentation; return its vocabulary size.

    Args:
        folder: Folder of the model.
        begin: Token before each text. Empty: none.
        end: Token behind each text, which also pads.
        longest: Longest input, in tokens.
        others: Further special tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(topics.values(), trainers.WordLevelTrainer(vocab_size=8000, special_tokens=["<unk>"]))
    marks = [mark for mark in (begin, end) if mark]
    tokenizer.add_special_tokens([*others, *marks])  # the end last, because CLIP pools at the highest token id
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*[begin] * bool(begin), "$A", end]),
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in marks],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "eos_token": end, "pad_token": end,
        "unk_token": "<unk>",
    }  # fmt: skip
    if begin:
        settings["bos_token"] = begin
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size: int = tokenizer.get_vocab_size()
    return size
