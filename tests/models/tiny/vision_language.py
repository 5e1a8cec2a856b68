"""Language models that are shown images: vectors of a conversation, and late interaction with pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from torch import nn

from tests.models.tiny.bodies import WIDTH, Body, save, widen
from tests.models.tiny.layout import write_json, write_modules
from tests.models.tiny.vocabularies import byte_bpe, chat_bpe

PATCH: Final = 14
MERGE: Final = 2
PAGE_WIDTH: Final = 24
"""Values of a vector of the models of late interaction."""
PAGE_SIDE: Final = 56
"""Side of the square that one of them makes of every image, in pixels."""
LONGEST: Final = 320

_SEEN: Final = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# As in Qwen2-VL's own folder, without videos and with numbers of images.
CHAT: Final = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chat_tokenizer() -> hf.PreTrainedTokenizerFast:
    tokenizer = chat_bpe(chat_template=CHAT, model_max_length=LONGEST)
    tokenizer.add_special_tokens({"additional_special_tokens": _SEEN})
    return tokenizer


def _text_settings(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": LONGEST,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }


def _marks(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, map(int, tokenizer.convert_tokens_to_ids(_SEEN)), strict=True))


def _qwen2_vl_config(tokenizer: hf.PreTrainedTokenizerFast) -> hf.Qwen2VLConfig:
    vision = {
        "depth": 2,
        "embed_dim": WIDTH,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    return hf.Qwen2VLConfig(vision_config=vision, text_config=_text_settings(len(tokenizer)), **_marks(tokenizer))


def _qwen2_5_vl_config(tokenizer: hf.PreTrainedTokenizerFast) -> hf.Qwen2_5_VLConfig:
    """Images are seen through windows of two by two merged patches, but for one layer."""
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "out_hidden_size": WIDTH,
        "num_heads": 4,
        "intermediate_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 2 * MERGE * PATCH,
        "fullatt_block_indexes": [1],
    }
    return hf.Qwen2_5_VLConfig(vision_config=vision, text_config=_text_settings(len(tokenizer)), **_marks(tokenizer))


def _write_patch_settings(folder: Path, *, tokens: tuple[int, int] = (4, 40), **others: Any) -> None:
    """As folders of the family have it. `tokens`: the fewest and the most that an image becomes."""
    fewest, most = (count * (PATCH * MERGE) ** 2 for count in tokens)
    write_json(
        folder / "preprocessor_config.json",
        {
            "min_pixels": fewest,
            "max_pixels": most,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            **others,
        },
    )


def _widen(model: nn.Module) -> None:
    widen(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                module.weight.normal_(0, 1.5 * module.weight[0].numel() ** -0.5)
            elif type(module).__name__ == "GemmaRMSNorm":
                module.get_parameter("weight").normal_(0, 0.2)  # it adds 1 to them


def _qwen2_vl(folder: Path) -> None:
    """The whole model that gives answers, as it is published: its vectors are those of the last token."""
    tokenizer = _chat_tokenizer()
    model = hf.Qwen2VLForConditionalGeneration(_qwen2_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    _write_patch_settings(folder)


def _qwen2_5_vl(folder: Path) -> None:
    """The same family's next version, in the layout of sentence-transformers."""
    tokenizer = _chat_tokenizer()
    model = hf.Qwen2_5_VLForConditionalGeneration(_qwen2_5_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    _write_patch_settings(folder)
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}), ("Normalize", {}))


def _colqwen2(folder: Path) -> None:
    tokenizer = _chat_tokenizer()
    config = hf.ColQwen2Config(vlm_config=_qwen2_vl_config(tokenizer), embedding_dim=PAGE_WIDTH)
    model = hf.ColQwen2ForRetrieval(config)
    _widen(model)
    save(folder, model, tokenizer)
    _write_patch_settings(folder)
    write_json(
        folder / "processor_config.json",
        {
            "processor_class": "ColQwen2Processor",
            "query_prefix": "Query: ",
            "visual_prompt_prefix": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
            "<|im_end|><|endoftext|>",
        },
    )


def _colpali(folder: Path) -> None:
    tokenizer = byte_bpe(end="", between="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_token = int(tokenizer.convert_tokens_to_ids("<image>"))
    text = {
        "model_type": "gemma",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": LONGEST,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": PAGE_SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    shown = hf.PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=image_token,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        vocab_size=len(tokenizer),
        pad_token_id=1,
    )
    model = hf.ColPaliForRetrieval(hf.ColPaliConfig(vlm_config=shown, embedding_dim=PAGE_WIDTH))
    _widen(model)
    save(folder, model, tokenizer, model_max_length=LONGEST)
    write_json(
        folder / "preprocessor_config.json",
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": (PAGE_SIDE // PATCH) ** 2,
            "processor_class": "ColPaliProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": PAGE_SIDE, "width": PAGE_SIDE},
        },
    )


SEEING: Mapping[str, Body] = {"qwen2-vl": _qwen2_vl, "qwen2.5-vl": _qwen2_5_vl}
"""One vector of a conversation with images, by name."""

PAGES: Mapping[str, Body] = {"colqwen2": _colqwen2, "colpali": _colpali}
"""Late interaction of texts with images, by name."""

VISION_LANGUAGE: Mapping[str, Body] = {**SEEING, **PAGES}
