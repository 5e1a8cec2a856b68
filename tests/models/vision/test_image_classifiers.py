"""Image classifiers of many families, against the image classification of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Image
from tests.models import oracle
from tests.models.images.drawing import drawing, encode
from tests.models.requests import classify
from tests.models.tiny.classify import labelled

EDGE: Final = 64
LABELS: Final = ("cat", "dog", "tree")
IMAGES: Final = [encode(drawing(*size), "PNG") for size in ((333, 217, 2), (61, 47, 4), (64, 64, 1), (90, 300, 3))]

GREY: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SQUARE: Final = {"size": {"height": EDGE, "width": EDGE}}
SHORTEST: Final = {"size": {"shortest_edge": EDGE}}
CROPPED: Final = {"size": {"shortest_edge": EDGE + 8}, "crop_size": {"height": EDGE, "width": EDGE}}
LAYERS: Final = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 48}
PATCHES: Final = {"image_size": EDGE, "patch_size": 16}
STAGES: Final = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
WINDOWS: Final = {"image_size": EDGE, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]}
CLIP: Final = {"vision_config": {**PATCHES, **LAYERS}}

FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any], str, Mapping[str, Any]]]] = {
    "vit": ("ViT", {**PATCHES, **LAYERS}, "ViT", {**SQUARE, **GREY}),
    "deit": ("DeiT", {**PATCHES, **LAYERS}, "DeiT", CROPPED),
    "beit": ("Beit", {**PATCHES, **LAYERS, "use_relative_position_bias": True}, "Beit", {**SQUARE, **GREY}),
    "beit-shared": ("Beit", {**PATCHES, **LAYERS, "use_shared_relative_position_bias": True}, "Beit", SQUARE),
    "data2vec": ("Data2VecVision", {**PATCHES, **LAYERS}, "Beit", SQUARE),
    "dinov2": ("Dinov2", {**PATCHES, **LAYERS}, "Bit", CROPPED),
    "dinov2-registers": ("Dinov2WithRegisters", {**PATCHES, **LAYERS}, "Bit", CROPPED),
    "siglip": ("Siglip", CLIP, "Siglip", {**SQUARE, **GREY}),
    "clip": ("CLIP", CLIP, "CLIP", CROPPED),
    "swin": ("Swin", {**WINDOWS, "window_size": 4}, "ViT", SQUARE),
    "swinv2": ("Swinv2", {**WINDOWS, "window_size": 4}, "ViT", SQUARE),
    "convnext": ("ConvNext", STAGES, "ConvNext", {**SHORTEST, "crop_pct": 0.875}),
    "convnextv2": ("ConvNextV2", STAGES, "ConvNext", {**SHORTEST, "crop_pct": 0.875}),
    "resnet": ("ResNet", {"embedding_size": 16, "layer_type": "bottleneck", **STAGES}, "ConvNext", SHORTEST),
    "regnet": ("RegNet", {"embedding_size": 16, "groups_width": 8, **STAGES}, "ConvNext", SHORTEST),
    "mobilenet-v2": ("MobileNetV2", {"image_size": EDGE, "depth_multiplier": 0.35}, "MobileNetV2", CROPPED),
    "pvt-v2": (
        "PvtV2",
        {
            "image_size": EDGE,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
        },
        "Pvt",
        SQUARE,
    ),
}
"""Prefix of the class, its config, prefix of the image processor, and its settings."""


def widen(model: nn.Module) -> None:
    """Make weights wide and random, and the state of batch norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" not in name and not name.endswith("weight"):
                parameter.normal_(0, 0.3)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.get_buffer("running_mean").normal_(0, 0.3)
                module.get_buffer("running_var").uniform_(0.5, 1.5)


def build(family: str, folder: Path) -> Path:
    model_prefix, config, processor_prefix, settings = FAMILIES[family]
    torch.manual_seed(5)
    kind = getattr(hf, f"{model_prefix}ForImageClassification")
    model = kind(kind.config_class(**config, **labelled(LABELS)))
    widen(model)
    model.save_pretrained(folder)
    getattr(hf, f"{processor_prefix}ImageProcessorPil")(**settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In a batch and alone."""
    folder = build(family, tmp_path / "model")
    model = load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact"))
    assert model.card.labels == LABELS
    given = [Image(file) for file in IMAGES]
    for activate in (True, False):
        wanted = oracle.image_labels(folder, IMAGES, activate=activate)
        close = 2e-5 * max(1.0, float(np.abs(wanted).max()))
        assert np.abs(classify(model, given, activate=activate).scores - wanted).max() <= close
        assert np.abs(classify(model, given, activate=activate, alone=True).scores - wanted).max() <= close
    assert np.ptp(wanted, axis=0).max() > 0.01  # the model does tell images apart
