"""Models with a tower for images: CLIP, SigLIP and SigLIP2, which read texts too, ViT and DINOv2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.tiny import bodies
from tests.models.tiny.bodies import Body
from tests.models.tiny.classify import labelled
from tests.models.tiny.layout import MODERN, write_json, write_modules
from tests.models.tiny.vocabularies import blank_bpe, clip_bpe, unigram

IMAGE_WIDTH = 48
"""Width of image vectors before their projection."""
PROJECTION = 24
EDGE = 64
PATCH = 16
LABELS = ("cat", "dog", "tree")

_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_PIXELS = {"image_size": EDGE, "patch_size": PATCH}
_GREY = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"


def _widen(model: nn.Module) -> None:
    """As `bodies.widen`; and what these models keep outside of layers."""
    bodies.widen(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.normal_(0, 4 * module.weight[0].numel() ** -0.5)
            elif isinstance(module, nn.MultiheadAttention):
                module.in_proj_weight.normal_(0, 1.5 * module.embed_dim**-0.5)
                module.in_proj_bias.normal_(0, 0.2)
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in (
                "class_embedding",
                "cls_token",
                "position_embeddings",
                "probe",
                "register_tokens",
            ):
                parameter.normal_(0, 1)
            elif name.endswith("lambda1"):
                parameter.normal_(1, 0.2)


def _save(folder: Path, model: hf.PreTrainedModel, tokenizer: Any, processor: Any, **tokenizer_config: Any) -> None:
    _widen(model)
    processor.save_pretrained(folder)
    if tokenizer is None:
        model.save_pretrained(folder)
    else:
        bodies.save(folder, model, tokenizer, **tokenizer_config)


def _clip_processor() -> Any:
    return hf.CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size={"height": EDGE, "width": EDGE})


def clip(folder: Path, *, end_token: int | None = None, **vision: Any) -> None:
    """Save a CLIP with its tokenizer's end token, or with `end_token` in its config."""
    tokenizer = clip_bpe()
    start, end = tokenizer.convert_tokens_to_ids(["<|startoftext|>", "<|endoftext|>"])
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": bodies.WIDTH,
        "max_position_embeddings": 77,
        "bos_token_id": start,
        "eos_token_id": end if end_token is None else end_token,
        "pad_token_id": end,
        "projection_dim": PROJECTION,
        **_LAYERS,
    }
    image = {"hidden_size": IMAGE_WIDTH, "projection_dim": PROJECTION, **_PIXELS, **_LAYERS, **vision}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=PROJECTION)
    _save(folder, hf.CLIPModel(config), tokenizer, _clip_processor(), tokenizer_class="CLIPTokenizer")


def _clip_old_end(folder: Path) -> None:
    """As all of OpenAI's folders: their configs have another id for the end of a text than their tokenizers."""
    clip(folder, end_token=2)


def _clip_st_old(folder: Path) -> None:
    """As sentence-transformers has saved it before version 5.4."""
    clip(folder / "0_CLIPModel")
    write_modules(folder, body="0_CLIPModel", first="sentence_transformers.models.CLIPModel")


def _clip_st(folder: Path) -> None:
    """As it is saved since, with vectors that are normalised."""
    clip(folder)
    write_modules(folder, ("sentence_transformers.base.modules.normalize.Normalize", {}), first=_TRANSFORMER)
    features = {
        kind: {"method": f"get_{kind}_features", "method_output_name": "pooler_output"} for kind in ("text", "image")
    }
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": features,
            "module_output_name": "sentence_embedding",
        },
    )


def _metaclip2(folder: Path) -> None:
    """A CLIP with the tokenizer of XLM-R, whose end token is 2: the id that is wrong in old folders of CLIP."""
    tokenizer = unigram()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": bodies.WIDTH,
        "max_position_embeddings": 77,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "projection_dim": PROJECTION,
        **_LAYERS,
    }
    image = {"hidden_size": IMAGE_WIDTH, "projection_dim": PROJECTION, **_PIXELS, **_LAYERS}
    config = hf.MetaClip2Config(text_config=text, vision_config=image, projection_dim=PROJECTION)
    _save(folder, hf.MetaClip2Model(config), tokenizer, _clip_processor(), model_max_length=77)


def _aimv2(folder: Path) -> None:
    """As aimv2-large-patch14-224-lit: CLIP's tokenizer and processor, other layers."""
    tokenizer = clip_bpe()
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": bodies.WIDTH,
        "max_position_embeddings": 77,
        "eos_token_id": end,
        **_LAYERS,
    }
    image = {"hidden_size": IMAGE_WIDTH, **_PIXELS, **_LAYERS}
    config = hf.Aimv2Config(text_config=text, vision_config=image, projection_dim=PROJECTION)
    model = hf.Aimv2Model(config)
    _widen(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ffn." in name:  # gated layers amplify rounding
                parameter.mul_(0.5)
    _clip_processor().save_pretrained(folder)
    bodies.save(folder, model, tokenizer, tokenizer_class="CLIPTokenizer")


def _siglip_text(vocabulary: int, **others: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": bodies.WIDTH,
        "max_position_embeddings": 64,
        "projection_size": PROJECTION,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **_LAYERS,
        **others,
    }


def siglip(
    folder: Path,
    *,
    lower_case: bool = False,
    canonical: bool = False,
    masked: bool = False,
    projection: int = PROJECTION,
    **tokenizer_config: Any,
) -> None:
    """Texts of 64 tokens, padding among them, which is seen unless it is `masked`."""
    tokenizer = unigram(begin="", lower_case=lower_case, canonical=canonical)
    names = ["input_ids", "attention_mask"] if masked else ["input_ids"]
    _save_siglip(folder, tokenizer, projection=projection, model_input_names=names, **tokenizer_config)


def _save_siglip(folder: Path, tokenizer: Any, *, projection: int = PROJECTION, **tokenizer_config: Any) -> None:
    image = {"hidden_size": PROJECTION, **_PIXELS, **_LAYERS}
    text = _siglip_text(len(tokenizer), projection_size=projection)
    config = hf.SiglipConfig(text_config=text, vision_config=image)
    processor = hf.SiglipImageProcessorPil(size={"height": EDGE, "width": EDGE}, **_GREY)
    _save(folder, hf.SiglipModel(config), tokenizer, processor, model_max_length=64, **tokenizer_config)


def _siglip_masked(folder: Path) -> None:
    siglip(folder, masked=True)


def _siglip2_fixed(folder: Path) -> None:
    """SigLIP2 for images of one size: a SigLIP with Gemma's tokenizer, whose class ignores `do_lower_case`."""
    settings: dict[str, Any] = {"model_input_names": ["input_ids"], "padding_side": "right", "do_lower_case": True}
    _save_siglip(folder, blank_bpe(), tokenizer_class="GemmaTokenizer", processor_class="SiglipProcessor", **settings)


def _siglip2_naflex(folder: Path) -> None:
    """Its tokenizer's class lowercases texts, and its file does not."""
    tokenizer = blank_bpe()
    image = {"hidden_size": PROJECTION, "num_patches": 16, "patch_size": PATCH, **_LAYERS}
    config = hf.Siglip2Config(text_config=_siglip_text(len(tokenizer)), vision_config=image)
    processor = hf.Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=30, **_GREY)
    settings: dict[str, Any] = {"model_input_names": ["input_ids"], "model_max_length": 64}
    _save(folder, hf.Siglip2Model(config), tokenizer, processor, **settings)


def _vit_processor() -> Any:
    return hf.ViTImageProcessorPil(size={"height": EDGE, "width": EDGE}, **_GREY)


def _vit_config(**others: Any) -> hf.ViTConfig:
    return hf.ViTConfig(hidden_size=IMAGE_WIDTH, **_PIXELS, **_LAYERS, **others)


def vit(folder: Path) -> None:
    _save(folder, hf.ViTModel(_vit_config()), None, _vit_processor())


def _vit_st_mean(folder: Path) -> None:
    """A chain of sentence-transformers on a model of images."""
    vit(folder)
    pooling = {"embedding_dimension": IMAGE_WIDTH, "pooling_mode": "mean"}
    write_modules(
        folder,
        (f"{MODERN}.pooling.Pooling", pooling),
        ("sentence_transformers.base.modules.normalize.Normalize", {}),
        first=_TRANSFORMER,
    )
    tokens = {"image": {"method": "forward", "method_output_name": "last_hidden_state"}}
    write_json(
        folder / "sentence_bert_config.json",
        {"transformer_task": "feature-extraction", "modality_config": tokens, "module_output_name": "token_embeddings"},
    )


def _vit_labels(folder: Path) -> None:
    _save(folder, hf.ViTForImageClassification(_vit_config(**labelled(LABELS))), None, _vit_processor())


def _dinov2_processor() -> Any:
    """Smaller images than its table of positions was made for, as its authors have it."""
    return hf.BitImageProcessorPil(
        size={"shortest_edge": EDGE + 8}, crop_size={"height": EDGE, "width": EDGE}, do_center_crop=True
    )


def _dinov2_config(**others: Any) -> hf.Dinov2Config:
    return hf.Dinov2Config(
        hidden_size=IMAGE_WIDTH, image_size=96, patch_size=PATCH, num_hidden_layers=3, num_attention_heads=4, **others
    )


def dinov2(folder: Path) -> None:
    _save(folder, hf.Dinov2Model(_dinov2_config()), None, _dinov2_processor())


def _dinov2_registers(folder: Path) -> None:
    settings = _dinov2_config().to_dict()
    del settings["model_type"], settings["architectures"], settings["transformers_version"]
    config = hf.Dinov2WithRegistersConfig(**settings, num_register_tokens=4)
    _save(folder, hf.Dinov2WithRegistersModel(config), None, _dinov2_processor())


def dinov3(folder: Path) -> None:
    """Its processor resizes in floating point; transformers has it on torchvision alone."""
    config = hf.DINOv3ViTConfig(
        hidden_size=IMAGE_WIDTH, image_size=EDGE, num_register_tokens=4, key_bias=True, patch_size=PATCH, **_LAYERS
    )
    model = hf.DINOv3ViTModel(config)
    _widen(model)
    model.save_pretrained(folder)
    size = {"height": EDGE, "width": EDGE}
    write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": size, "resample": 2, "do_rescale": True,
         "rescale_factor": 1 / 255, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
         "default_to_square": True, "do_center_crop": None, "do_pad": None, "data_format": "channels_first"},
    )  # fmt: skip


def _dinov2_labels(folder: Path) -> None:
    _save(folder, hf.Dinov2ForImageClassification(_dinov2_config(**labelled(LABELS))), None, _dinov2_processor())


TWO_TOWERS: Mapping[str, Body] = {
    "clip": clip,
    "clip-old-end": _clip_old_end,
    "clip-st": _clip_st,
    "clip-st-old": _clip_st_old,
    "metaclip2": _metaclip2,
    "aimv2": _aimv2,
    "siglip": siglip,
    "siglip-masked": _siglip_masked,
    "siglip2-fixed": _siglip2_fixed,
    "siglip2-naflex": _siglip2_naflex,
}
"""Models of texts and of images, by name."""

IMAGE_ENCODERS: Mapping[str, Body] = {
    "vit": vit,
    "vit-st-mean": _vit_st_mean,
    "dinov2": dinov2,
    "dinov2-registers": _dinov2_registers,
}

IMAGE_CLASSIFIERS: Mapping[str, Body] = {"vit-labels": _vit_labels, "dinov2-labels": _dinov2_labels}
