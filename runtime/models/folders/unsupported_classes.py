"""Refuse a checkpoint whose class has a head that would be left out.

A folder without `modules.json` says only by the class in `architectures` what its weights are for. A class of
transformers that is a bare transformer, or one that was trained to fill in or continue texts, may be read as an encoder
of texts. Any other class has a head that makes the results its author wants: vectors without it look right and are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING
from transformers.models.auto import modeling_auto

from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.images import known_models
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_HEADLESS: Final = ("", "FOR_TEXT_ENCODING", "FOR_PRETRAINING", "FOR_MASKED_LM", "FOR_CAUSAL_LM")
"""Tables of transformers whose classes are bare, or have the head of a pretraining task."""

_WRITES: Final = "FOR_SEQ_TO_SEQ_CAUSAL_LM"
"""The table of classes that write a text with a decoder beside the encoder."""

_OWN_HEADLESS: Final = ("Model", "ForMaskedLM", "ForPreTraining", "ForCausalLM", "LMHeadModel")
"""How classes of a folder's own code end that have no other head."""

_OTHER_INPUTS: Final[Mapping[str, str]] = {
    "pixel_values": "images",
    "pixel_values_videos": "videos",
    "input_values": "audio",
    "input_features": "audio",
}
"""What a class of transformers reads, by its `main_input_name`."""


_HALF: Final = "one tower of a model of two: serve the folder of the whole model"
_PARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"), _HALF),
    **dict.fromkeys(("siglip2_text_model", "siglip2_vision_model"), _HALF),
    "dpr": (
        "an encoder of DPR, whose class keeps its vector in a form of its own: serve the folder of the same model that "
        "sentence-transformers has (facebook-dpr-...)"
    ),
}
"""What cannot be read by itself, by `model_type`, and what can."""

_OTHER_POSITIONS: Final = ("alibi", "relative_key", "relative_key_query")
"""Kinds of positions that transformers' classes no longer compute, and leave out without a word."""

_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of folders whose models read more than texts."""


def check_class(folder: ModelFolder, *, own_code: bool) -> None:
    """Refuse a folder whose class is none that can be read without its head, or that reads no texts.

    Args:
        folder: What was read of it.
        own_code: Whether code of the folder's own may run.

    Raises:
        ConfigError: Names the class, and what would be right.
    """
    if folder.architecture not in ("encoder", "image encoder"):
        return
    ran = own_code and bool(folder.config.get("auto_map"))
    if folder.architecture == "encoder" and not ran:
        _check_inputs(folder.config)
        _check_positions(folder.config)
    if folder.reading == "assumed":
        _check_head(folder, ran=ran)
    elif folder.reading == "folder" and not ran:
        _check_own_class(folder.config)


def _check_head(folder: ModelFolder, *, ran: bool) -> None:
    name = class_name(folder.config)
    if not name or name in _headless() or (ran and name.endswith(_OWN_HEADLESS) and not _is_rewarding(name)):
        return
    alone = "--task embed (task='embed') reads its transformer alone, as an embedding model"
    if any((folder.body / file).is_file() for file in _PROCESSORS):
        raise ConfigError(f"config.json: architectures names {name}, which is not supported")
    if name in _names(_WRITES):
        kind = folder.config.get("model_type")
        apart = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_TEXT_ENCODING_MAPPING
        advice = f"; {alone.replace('transformer', 'encoder')}" if apart else ""
        raise ConfigError(
            f"config.json: architectures names {name}, which writes texts with a decoder: it is no pooling model"
            f"{advice}"
        )
    raise ConfigError(
        f"config.json: architectures names {name}, whose head is not supported: vectors without it would not be its "
        f"results; {alone}"
    )


def _is_rewarding(name: str) -> bool:
    return name.endswith(("RewardModel", "DoubleHeadsModel"))


def _check_own_class(config: Mapping[str, Any]) -> None:
    """Reject a class of the folder's own code, which is not run, where transformers has another of its `model_type`."""
    name, named = class_name(config), config.get("auto_map")
    if isinstance(named, Mapping) and "AutoModel" in named and name and not hasattr(transformers, name):
        raise ConfigError(
            f"config.json: architectures names {name}, a class of the folder's own code (auto_map), which is not run "
            "unless trust_remote_code (--trust-remote-code) is set"
        )


def _check_positions(config: Mapping[str, Any]) -> None:
    kind = config.get("position_embedding_type")
    if kind in _OTHER_POSITIONS:
        raise ConfigError(f"config.json: position_embedding_type={kind!r} is not supported by transformers' class")


def _check_inputs(config: Mapping[str, Any]) -> None:
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return
    if kind in _PARTS:
        raise ConfigError(f"config.json: model_type={kind!r} is {_PARTS[kind]}")
    of = CONFIG_MAPPING[kind]
    found = MODEL_FOR_TEXT_ENCODING_MAPPING.get(of, None) or MODEL_MAPPING.get(of, None)
    first = found[0] if isinstance(found, tuple) else found
    read = getattr(first, "main_input_name", "input_ids")
    if read != "input_ids":
        what = _OTHER_INPUTS.get(read, read)
        known = f"; of models of images only {', '.join(known_models())} are supported" if what == "images" else ""
        raise ConfigError(f"config.json: model_type={kind!r} reads {what}, and not texts: it is not supported{known}")


@cache
def _headless() -> frozenset[str]:
    """Names of all classes of transformers that have no head, or that of a pretraining task of an encoder."""
    bare = (name for table in _HEADLESS for name in _names(table) if "For" not in name or name.endswith(_OWN_HEADLESS))
    return frozenset(bare) - _names(_WRITES) - {"T5Model", "MT5Model", "UMT5Model"}


@cache
def _names(table: str) -> frozenset[str]:
    """Names of the classes in one of transformers' tables."""
    content = getattr(modeling_auto, f"MODEL_{table}_MAPPING_NAMES".replace("__", "_"))
    names: set[str] = set()
    for value in content.values():
        names.update([value] if isinstance(value, str) else value)
    return frozenset(names)
