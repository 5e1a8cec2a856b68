"""Language models that are shown images: vectors of a conversation, and late interaction with pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.tiny.bodies import WIDTH, Body, modernbert_config, save, widen
from tests.models.tiny.layout import edit_json, write_json, write_modules, write_prompts
from tests.models.tiny.vocabularies import byte_bpe, chat_bpe

PATCH: Final = 14
MERGE: Final = 2
PAGE_WIDTH: Final = 24
"""Values of a vector of the models of late interaction."""
PAGE_SIDE: Final = 56
"""Side of the square that one of them makes of every image, in pixels."""
LONGEST: Final = 320
QWEN3_PATCH: Final = 16
QWEN3_LONGEST: Final = 512

_SEEN: Final = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# As in Qwen2-VL's own folder, without numbers of images.
CHAT: Final = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# As in Qwen3-VL's own folder, without tools: no system message but the caller's.
QWEN3_CHAT: Final = (
    "{%- macro written(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' or 'video' in part -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + written(message.content) + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


QWEN3_QUESTION: Final = "Given a search query, retrieve relevant candidates that answer the query."
QWEN3_PAIRS: Final = (
    "{%- macro written(role) -%}{%- for message in messages if message.role == role -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endfor -%}{%- endmacro -%}"
    "{{- '<|im_start|>system\\nJudge.<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' + written('system') + '<Query>:' "
    "+ written('query') + '\\n<Document>:' + written('document') + '<|im_end|>\\n<|im_start|>assistant\\n' -}}"
)
"""Chat template of a reranker of sentence-transformers, in short."""


def _chat_tokenizer(template: str = CHAT, longest: int = LONGEST) -> hf.PreTrainedTokenizerFast:
    tokenizer = chat_bpe(chat_template=template, model_max_length=longest)
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
    """The whole model that gives answers, in the layout of sentence-transformers: vectors of the last token."""
    tokenizer = _chat_tokenizer()
    model = hf.Qwen2VLForConditionalGeneration(_qwen2_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    _write_patch_settings(folder)
    _write_last_token(folder)


def _qwen2_5_vl(folder: Path) -> None:
    """The same family's next version."""
    qwen2_5_vl_instruct(folder)
    _write_last_token(folder)


def qwen2_5_vl_instruct(folder: Path) -> None:
    """The model that gives answers, as it is published: no file says that it makes vectors."""
    tokenizer = _chat_tokenizer()
    model = hf.Qwen2_5_VLForConditionalGeneration(_qwen2_5_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    _write_patch_settings(folder)


def _write_last_token(folder: Path) -> None:
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}), ("Normalize", {}))


def _jina_v4_vllm(folder: Path) -> None:
    """jina-embeddings-v4-vllm-retrieval: only its card and its name tell it from other models of the class."""
    qwen2_5_vl_instruct(folder)
    (folder / "README.md").write_text(
        "---\ntags:\n- vidore\n- multimodal-embedding\n---\n# Jina Embeddings v4: retrieval\n\n"
        '    model = LLM(\n        model="jinaai/jina-embeddings-v4-vllm-retrieval",\n        task="embed",\n'
    )


def _biqwen2_5(folder: Path) -> None:
    """BiQwen2_5 of colpali-engine, with all of its weights."""
    tokenizer = _chat_tokenizer()
    model = hf.Qwen2_5_VLModel(_qwen2_5_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    edit_json(folder / "config.json", architectures=["BiQwen2_5"])
    _write_patch_settings(folder)


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


def qwen3_vl_config(tokenizer: hf.PreTrainedTokenizerFast) -> hf.Qwen3VLConfig:
    """Two layers of the image encoder go to inner layers, too, as in DeepStack."""
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "out_hidden_size": WIDTH,
        "num_heads": 4,
        "intermediate_size": 64,
        "patch_size": QWEN3_PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _text_settings(len(tokenizer)) | {"head_dim": 16, "max_position_embeddings": QWEN3_LONGEST}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    }
    return hf.Qwen3VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=True, **_marks(tokenizer))


def _qwen3_vl(folder: Path) -> None:
    """Qwen3-VL-Embedding, with the files and the names of weights of its repository."""
    tokenizer = _chat_tokenizer(QWEN3_CHAT, QWEN3_LONGEST)
    model = hf.Qwen3VLForConditionalGeneration(qwen3_vl_config(tokenizer))
    _widen(model)
    save(folder, model, tokenizer)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-VL-Embedding-2B\n")
    write_json(
        folder / "preprocessor_config.json",
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": QWEN3_PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
    )
    write_json(
        folder / "video_preprocessor_config.json",
        {
            "size": {"longest_edge": 64 * 1024, "shortest_edge": 8 * 1024},
            "patch_size": QWEN3_PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    )


def _qwen3_vl_reranker(folder: Path) -> None:
    """Qwen3-VL-Reranker: only its name tells it from other models of the class."""
    _qwen3_vl(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-VL-Reranker-2B\n")


def _qwen3_vl_cross_encoder(folder: Path) -> None:
    """The same reranker in the layout of sentence-transformers: a message for each text of a pair."""
    _qwen3_vl(folder)
    (folder / "chat_template.jinja").write_text(QWEN3_PAIRS)
    forward = {"method": "forward", "method_output_name": "logits"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "any-to-any",
            "modality_config": {"text": forward, "image": forward, "message": {**forward, "format": "structured"}},
            "module_output_name": "causal_logits",
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "prompts": {"query": QWEN3_QUESTION},
            "default_prompt_name": "query",
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
        },
    )
    yes, no = hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["yes", "no"])
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    write_modules(folder, (kind, {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}))


def _jina_m0(folder: Path) -> None:
    """jina-reranker-m0: a Qwen2-VL under its older names of weights, and two layers for the score."""
    tokenizer = _chat_tokenizer()
    config = _qwen2_vl_config(tokenizer)
    config.tie_word_embeddings = True
    body = hf.Qwen2VLForConditionalGeneration(config)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    _widen(body)
    _widen(layers)
    save(folder, body, tokenizer)
    weights = {f"score.{name}": value.contiguous() for name, value in layers.state_dict().items()}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.startswith("lm_head."):
            old = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
            weights[old] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"AutoModel": "modeling.JinaVLForRanking"}
    edit_json(folder / "config.json", architectures=["JinaVLForRanking"], auto_map=own, num_labels=1)
    _write_patch_settings(folder, tokens=(4, 16384))


def _qwen3_vl_modules(folder: Path) -> None:
    """The same model in the layout of sentence-transformers."""
    _qwen3_vl(folder)
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": forward,
                "image": forward,
                "video": forward,
                "message": {**forward, "format": "structured"},
            },
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
            "unpad_inputs": False,
        },
    )
    write_prompts(folder, {"query": "Find pages about it", "document": "Represent the user's input."})
    pooling = {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken", "include_prompt": True}
    write_modules(folder, ("Pooling", pooling), ("Normalize", {}))


SEEING: Mapping[str, Body] = {"qwen2-vl": _qwen2_vl, "qwen2.5-vl": _qwen2_5_vl}
"""One vector of a conversation with images, by name."""


def _save_engine(folder: Path, body: hf.PreTrainedModel, name: str, width: int, prefix: str = "") -> None:
    """Save a body and the linear layer of a page retriever as colpali-engine names them."""
    layer = nn.Linear(WIDTH, width)
    _widen(nn.ModuleList([body, layer]))
    tokenizer = _chat_tokenizer()
    save(folder, body, tokenizer)
    names = {f"{prefix}{key}": value.contiguous() for key, value in body.state_dict().items()}
    projection = "embedding_proj_layer" if prefix else "custom_text_proj"
    names |= {f"{projection}.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    save_file(names, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", architectures=[name])


def _colqwen2_5(folder: Path) -> None:
    """ColQwen2_5 of colpali-engine: a Qwen2_5_VLModel with one more layer."""
    body = hf.Qwen2_5_VLModel(_qwen2_5_vl_config(_chat_tokenizer()))
    _save_engine(folder, body, "ColQwen2_5", PAGE_WIDTH)
    _write_patch_settings(folder)


def _colqwen3(folder: Path) -> None:
    """ColQwen3 in the layout of TomoroAI: a class, a config and prompts of its own."""
    body = hf.Qwen3VLModel(qwen3_vl_config(_chat_tokenizer()))
    _save_engine(folder, body, "ColQwen3", PAGE_WIDTH, "vlm.model.")
    own = {"AutoConfig": "configuration_colqwen3.ColQwen3Config", "AutoModel": "modeling_colqwen3.ColQwen3"}
    edit_json(folder / "config.json", model_type="colqwen3", auto_map=own, embed_dim=PAGE_WIDTH)
    write_json(folder / "processor_config.json", {"processor_class": "ColQwen3Processor", "query_prefix": None})
    pixels = {"longest_edge": 16777216, "shortest_edge": 4 * 32 * 32}
    _write_patch_settings(folder)
    settings = {"patch_size": QWEN3_PATCH, "size": pixels, "min_pixels": None, "max_pixels": None}
    edit_json(folder / "preprocessor_config.json", **settings, image_mean=[0.5] * 3, image_std=[0.5] * 3)


# As in PaddleOCR-VL's own folder, without answers.
_OCR_CHAT: Final = (
    "{{ '<|begin_of_sentence|>' }}{% for message in messages %}{{ 'User: ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}"
    "{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


def _paddleocr_vl(folder: Path) -> None:
    """PaddleOCR-VL with the flat config and the older names of weights of its repository."""
    tokenizer = chat_bpe(chat_template=_OCR_CHAT, model_max_length=LONGEST)
    marks = ["<|IMAGE_PLACEHOLDER|>", "<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|begin_of_sentence|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, map(int, tokenizer.convert_tokens_to_ids(marks[:4])), strict=True))
    text = _text_settings(len(tokenizer)) | {"head_dim": 8, "tie_word_embeddings": True, "bos_token_id": 1}
    vision = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 8 * PATCH,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    config = hf.PaddleOCRVLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = hf.PaddleOCRVLForConditionalGeneration(config)
    _widen(model)
    save(folder, model, tokenizer)
    weights = {}
    for name, value in model.state_dict().items():
        old = name.replace("model.visual.", "visual.").replace("model.projector.", "mlp_AR.")
        weights[old.replace("model.language_model.", "model.")] = value.contiguous()
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    flat = json.loads((folder / "config.json").read_text())
    flat |= {key: value for key, value in flat.pop("text_config").items() if key not in ("model_type", "dtype")}
    flat["vision_config"]["model_type"] = "paddleocr_vl"
    own = {"AutoModel": "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration"}
    write_json(folder / "config.json", {**flat, "auto_map": own})
    fewest, most = (count * (PATCH * MERGE) ** 2 for count in (4, 40))
    settings = {"image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": PATCH, "merge_size": MERGE}
    pixels = {"temporal_patch_size": 1, "min_pixels": fewest, "max_pixels": most}
    write_json(folder / "preprocessor_config.json", {**settings, **pixels})


OCR: Mapping[str, Body] = {"paddleocr-vl": _paddleocr_vl}
"""Models that were trained to read pages aloud, by name."""

TILE: Final = 32
"""Edge of a tile, in pixels."""
TILED_LONGEST: Final = 80
"""Longest edge of an image before it is brought to whole tiles."""
_SHUFFLE: Final = 2


def _tile_tokenizer(begin: str, end: str) -> hf.PreTrainedTokenizerFast:
    """Only tiles of the first two rows have tokens of their own: others are written in words, as in real folders."""
    tokenizer = byte_bpe(begin=begin, end=end)
    named = [f"<row_{row + 1}_col_{column + 1}>" for row in range(2) for column in range(3)]
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<|im_start|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *named]})
    tokenizer.model_max_length = 512
    return tokenizer


def _tile_vision(**others: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": TILE,
        "patch_size": 8,
        **others,
    }


def _write_tile_settings(folder: Path, processor: str, **others: Any) -> None:
    """As folders of the family have it: bilinear or Lanczos resizing, and 13 or 17 tiles of a page."""
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "do_pad": True,
        "max_image_size": {"longest_edge": TILE},
        "size": {"longest_edge": TILED_LONGEST},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "processor_class": processor,
    }
    write_json(folder / "preprocessor_config.json", image_processor)
    tokens = (TILE // 8 // _SHUFFLE) ** 2
    write_json(folder / "processor_config.json", {"processor_class": processor, "image_seq_len": tokens, **others})


def _colmodernvbert(folder: Path) -> None:
    """ColModernVBertForRetrieval of transformers: a ModernBERT, so tokens see the tiles after them."""
    tokenizer = _tile_tokenizer("<s>", "</s>")
    text = modernbert_config(len(tokenizer)).to_dict() | {"model_type": "modernbert", "max_position_embeddings": 512}
    body = hf.ModernVBertConfig(
        text_config=text,
        vision_config=_tile_vision(model_type="siglip_vision_model", vision_use_head=False),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=_SHUFFLE,
    )
    model = hf.ColModernVBertForRetrieval(hf.ColModernVBertConfig(vlm_config=body, embedding_dim=PAGE_WIDTH))
    _widen(model)
    save(folder, model, tokenizer)
    _write_tile_settings(folder, "ColModernVBertProcessor")


def _colidefics3(folder: Path) -> None:
    """ColIdefics3 of colpali-engine: a Llama that sees tiles, and one more layer."""
    tokenizer = _tile_tokenizer("", "")
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "pad_token_id": 1,
    }
    body = hf.Idefics3Model(
        hf.Idefics3Config(
            text_config=text,
            vision_config=_tile_vision(),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=_SHUFFLE,
        )
    )
    layer = nn.Linear(WIDTH, PAGE_WIDTH)
    _widen(nn.ModuleList([body, layer]))
    save(folder, body, tokenizer)
    names = {f"model.{key}": value.contiguous() for key, value in body.state_dict().items()}
    names |= {f"linear.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    save_file(names, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", architectures=["ColIdefics3"])
    _write_tile_settings(folder, "ColIdefics3Processor")


TILED_PAGES: Mapping[str, Body] = {"colmodernvbert": _colmodernvbert, "colidefics3": _colidefics3}
"""Page retrievers that see an image in tiles, by name."""

NAMED: Mapping[str, Body] = {"jina-v4-vllm": _jina_v4_vllm, "biqwen2.5": _biqwen2_5}
"""One vector of a text or of a page, by name: their folders do not state how."""

ENGINE_PAGES: Mapping[str, Body] = {"colqwen2.5": _colqwen2_5, "colqwen3": _colqwen3}
"""Page retrievers of colpali-engine, by name."""

PAGES: Mapping[str, Body] = {"colqwen2": _colqwen2, "colpali": _colpali}
"""Late interaction of texts with images, by name."""

VISION_LANGUAGE: Mapping[str, Body] = {**SEEING, **PAGES}

QWEN3_VL: Mapping[str, Body] = {
    "qwen3-vl": _qwen3_vl,
    "qwen3-vl-modules": _qwen3_vl_modules,
    "qwen3-vl-reranker": _qwen3_vl_reranker,
    "qwen3-vl-cross-encoder": _qwen3_vl_cross_encoder,
    "jina-m0": _jina_m0,
}
"""Conversations and pairs with images, by name."""
