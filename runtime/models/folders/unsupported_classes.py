"""Checks that reject a checkpoint whose class has an unsupported head.

In a folder without `modules.json` only the class in `architectures` says what the weights are for. A bare transformer,
or one pretrained to fill in or continue texts, may be read as a text encoder. Any other class has a head that computes
the author's results: vectors without it look right and are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING
from transformers.models.auto import modeling_auto

from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.images import supported_image_models
from staged_pool.runtime.models.folders.vision_embedders import VISION_CHAT_MODELS
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.specs.own_models import HEADLESS
from staged_pool.stages.errors import ConfigError

_HEADLESS: Final = ("", "FOR_TEXT_ENCODING", "FOR_PRETRAINING", "FOR_MASKED_LM", "FOR_CAUSAL_LM")
"""Tables of transformers (`MODEL_..._MAPPING_NAMES`) of bare classes and of pretraining classes."""

_SEQ2SEQ: Final = "FOR_SEQ_TO_SEQ_CAUSAL_LM"
"""The table of encoder-decoder classes, which generate text."""

_HEADLESS_ENDINGS: Final = ("Model", "ForMaskedLM", "ForPreTraining", "ForCausalLM", "LMHeadModel")
"""Name endings of bare and pretraining classes, for classes that the folder's own code defines."""

_MODALITIES: Final[Mapping[str, str]] = {
    "pixel_values": "images",
    "pixel_values_videos": "videos",
    "input_values": "audio",
    "input_features": "audio",
}
"""Input modality of a transformers class, by its `main_input_name`."""


_ONE_TOWER: Final = "one tower of a model with two: serve the folder of the whole model"
_INCOMPLETE_MODELS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"), _ONE_TOWER),
    **dict.fromkeys(("siglip2_text_model", "siglip2_vision_model"), _ONE_TOWER),
    "dpr": (
        "an encoder of DPR in its original layout: serve the sentence-transformers folder of the same model "
        "(facebook-dpr-...)"
    ),
}
"""Folders that cannot be served, by `model_type`, and the folder to serve instead."""

_BOXES: Final = "the box of each word on its page"
_BESIDE_TEXT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("bros", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "udop"), _BOXES),
    "markuplm": "the place of each word in its HTML page (xpath)",
    "roc_bert": "the shape and the pronunciation of each character",
    "tapas": "the row and the column of each word in its table",
}
"""Inputs that a model reads beside its tokens, by `model_type`: transformers puts zeros in their place."""

_OTHER_POSITIONS: Final = ("alibi", "relative_key", "relative_key_query")
"""Position embeddings that transformers' classes dropped: they now ignore the setting silently."""

_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Processor files of models that read more than text."""


def check_class(folder: ModelFolder, *, own_code: bool) -> None:
    """Reject a class with an unsupported head, or one that does not read text.

    Args:
        folder: The settings read from the folder.
        own_code: True if the folder's own Python code may run.

    Raises:
        ConfigError: Names the class and what to do instead.
    """
    runs_own_code = own_code and bool(folder.config.get("auto_map"))
    if not runs_own_code:
        _check_beside_text(folder)
    if folder.architecture not in ("encoder", "image encoder"):
        return
    if folder.architecture == "encoder" and not runs_own_code:
        _check_inputs(folder.config)
        _check_positions(folder.config)
    if folder.decided_by == "assumed":
        _check_head(folder, runs_own_code=runs_own_code)
    elif folder.decided_by == "folder" and not runs_own_code:
        _check_own_class(folder.config)


def _check_beside_text(folder: ModelFolder) -> None:
    """Reject a model of pages or tables, unless vectors of bare texts are asked for."""
    missing = _BESIDE_TEXT.get(str(folder.config.get("model_type")))
    if missing is None or (folder.architecture == "encoder" and folder.decided_by != "assumed"):
        return
    name = class_name(folder.config) or folder.config["model_type"]
    raise ConfigError(
        f"config.json: architectures names {name}, which also reads {missing}: a bare text does not have that, and "
        "results without it would be wrong; --task embed (task='embed') gives vectors of texts without it"
    )


def _check_head(folder: ModelFolder, *, runs_own_code: bool) -> None:
    name = class_name(folder.config)
    headless = name in _headless() or (
        runs_own_code and name.endswith(_HEADLESS_ENDINGS) and not _is_reward_model(name)
    )
    if not name or headless:
        return
    alone = "--task embed (task='embed') uses its transformer alone, as an embedding model"
    if any((folder.body / file).is_file() for file in _PROCESSORS):
        known = ", ".join((*VISION_CHAT_MODELS, *supported_image_models()))
        raise ConfigError(
            f"config.json: architectures names {name}, which is not supported: it also reads images, in a way of its "
            f"own; supported models of texts and images: {known}"
        )
    if name in _names(_SEQ2SEQ):
        kind = folder.config.get("model_type")
        has_encoder = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_TEXT_ENCODING_MAPPING
        advice = f"; {alone.replace('transformer', 'encoder')}" if has_encoder else ""
        raise ConfigError(
            f"config.json: architectures names {name}, which generates text with a decoder: it is not a pooling model"
            f"{advice}"
        )
    raise ConfigError(
        f"config.json: architectures names {name}, whose head is not supported: without it the model's results would "
        f"be wrong; {alone}"
    )


def _is_reward_model(name: str) -> bool:
    return name.endswith(("RewardModel", "DoubleHeadsModel"))


def _check_own_class(config: Mapping[str, Any]) -> None:
    """Reject a class of the folder's own code: transformers would load another class of that `model_type`."""
    name, named = class_name(config), config.get("auto_map")
    if isinstance(named, Mapping) and "AutoModel" in named and name and not hasattr(transformers, name):
        raise ConfigError(
            f"config.json: architectures names {name}, a class of the folder's own code (auto_map), which is not run "
            "unless trust_remote_code (--trust-remote-code) is set"
        )


def _check_positions(config: Mapping[str, Any]) -> None:
    kind = config.get("position_embedding_type")
    if kind in _OTHER_POSITIONS:
        raise ConfigError(f"config.json: position_embedding_type={kind!r} is not supported by the transformers class")


def _check_inputs(config: Mapping[str, Any]) -> None:
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return
    if kind in _INCOMPLETE_MODELS:
        raise ConfigError(f"config.json: model_type={kind!r} is {_INCOMPLETE_MODELS[kind]}")
    config_class = CONFIG_MAPPING[kind]
    found = MODEL_FOR_TEXT_ENCODING_MAPPING.get(config_class, None) or MODEL_MAPPING.get(config_class, None)
    first = found[0] if isinstance(found, tuple) else found
    input_name = getattr(first, "main_input_name", "input_ids")
    if input_name != "input_ids":
        modality = _MODALITIES.get(input_name, input_name)
        known = f"; supported image models: {', '.join(supported_image_models())}" if modality == "images" else ""
        raise ConfigError(f"config.json: model_type={kind!r} reads {modality}, not text: it is not supported{known}")


@cache
def _headless() -> frozenset[str]:
    """Names of the transformers classes that have no head or only a pretraining head."""
    names = (name for table in _HEADLESS for name in _names(table))
    bare = (name for name in names if "For" not in name or name.endswith(_HEADLESS_ENDINGS))
    return HEADLESS | frozenset(bare) - _names(_SEQ2SEQ) - {"T5Model", "MT5Model", "UMT5Model"}


@cache
def _names(table: str) -> frozenset[str]:
    """Names of the classes in one of transformers' tables."""
    content = getattr(modeling_auto, f"MODEL_{table}_MAPPING_NAMES".replace("__", "_"))
    names: set[str] = set()
    for value in content.values():
        names.update([value] if isinstance(value, str) else value)
    return frozenset(names)
