"""Folders of models of real sizes, with random weights that the device makes.

Random weights take the same time as trained ones. They are made on the device, in the data type in which they are
saved: a model of four billion weights takes seconds that way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from perf.gpu.models import bert_folder
from perf.tools.jpegs import write_word_tokenizer

Reads = Literal["texts", "images"]


@dataclass(frozen=True, slots=True)
class LargeModel:
    """A model of a real size."""

    name: str
    reads: Reads
    """Inputs that it is measured with."""
    write: Callable[[Path, torch.device, torch.dtype], None]
    """Writes the model into a folder, which is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSize:
    """Size of an encoder of BERT's kind."""

    layers: int
    width: int
    heads: int

    def write(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Write a model whose vectors are means; see `bert_folder`."""
        bert_folder(
            folder,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            inner=4 * self.width,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            tokenizer=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSize:
    """Size of a decoder of Qwen3-Embedding's kind."""

    layers: int
    width: int
    heads: int
    inner: int

    def write(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Write a model whose vectors are those of the last token, as sentence-transformers stores it."""
        from transformers import Qwen3Config, Qwen3Model

        words = write_word_tokenizer(folder, begin="", end="<|endoftext|>", longest=32_768)
        config = Qwen3Config(
            vocab_size=max(151_669, words),
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=self.inner,
            max_position_embeddings=32_768,
        )
        with _making(device, dtype):
            Qwen3Model(config).save_pretrained(folder)
        _write_pooling(folder, "lasttoken", width=self.width, longest=8192)


def _write_clip(folder: Path, device: torch.device, dtype: torch.dtype, *, layers: int = 24) -> None:
    """Write CLIP ViT-L/14, whose images are squares of 224 pixels."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    words = write_word_tokenizer(folder, begin="<|startoftext|>", end="<|endoftext|>", longest=77)
    text = {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768,
        "vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16,
        "patch_size": 14, "projection_dim": 768,
    }  # fmt: skip
    with _making(device, dtype):
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def _write_qwen2_vl(
    folder: Path, device: torch.device, dtype: torch.dtype, *, layers: int = 28, depth: int = 32
) -> None:
    """Write Qwen2-VL of two billion weights; an image of 640 x 480 pixels becomes 391 tokens."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    marks = {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")}
    marks |= {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
    write_word_tokenizer(
        folder, begin="", end="<|endoftext|>", longest=32_768, others=("<|im_start|>", "<|im_end|>", *marks.values())
    )
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _CHAT}))
    text = {
        "vocab_size": 151_936, "hidden_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "pad_token_id": known.token_to_id("<|endoftext|>"), "bos_token_id": None,
        "eos_token_id": known.token_to_id("<|im_end|>"),
    }  # fmt: skip
    vision = {"depth": depth, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4}
    ids = {name: known.token_to_id(mark) for name, mark in marks.items()}
    with _making(device, dtype):
        config = Qwen2VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=True, **ids)
        Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    processor = {
        "min_pixels": 56 * 56, "max_pixels": 1280 * 28 * 28, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "Qwen2VLImageProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_pooling(folder, "lasttoken", width=1536, longest=32_768)


LARGE_MODELS: Final = (
    LargeModel("bge-large", "texts", BertSize(layers=24, width=1024, heads=16).write),
    LargeModel("Qwen3-Embedding-0.6B", "texts", QwenSize(layers=28, width=1024, heads=16, inner=3072).write),
    LargeModel("CLIP-L", "images", _write_clip),
    LargeModel("Qwen2-VL-2B", "images", _write_qwen2_vl),
    LargeModel("MiniLM-L6", "texts", BertSize(layers=6, width=384, heads=12).write),
    LargeModel("bge-base", "texts", BertSize(layers=12, width=768, heads=12).write),
    LargeModel("Qwen3-Embedding-4B", "texts", QwenSize(layers=36, width=2560, heads=32, inner=9728).write),
)
"""Models of the sizes that their authors publish."""

SHORT_MODELS: Final = (
    LargeModel("BERT, 1 layer", "texts", BertSize(layers=1, width=128, heads=4).write),
    LargeModel("Qwen3, 1 layer", "texts", QwenSize(layers=1, width=128, heads=16, inner=128).write),
    LargeModel("CLIP, 1 layer", "images", partial(_write_clip, layers=1)),
    LargeModel("Qwen2-VL, 1 layer", "images", partial(_write_qwen2_vl, layers=1, depth=1)),
)
"""Models that a run on a CPU can bear."""

_CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def _making(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make tensors on a device, in a data type, during the block."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _write_pooling(folder: Path, mode: str, *, width: int, longest: int) -> None:
    """Write the files of sentence-transformers: pooling, then vectors of length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    flags: Mapping[str, Any] = {
        f"pooling_mode_{name}": name in {f"{mode}_tokens", mode}
        for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **flags}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
