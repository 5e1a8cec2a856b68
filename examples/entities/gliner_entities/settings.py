"""Settings of a GLiNER folder: `gliner_config.json`, read strictly.

A setting that asks for another architecture is rejected by its name, because its entities would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool import ConfigError

FILE: Final = "gliner_config.json"

_ONLY: Final[Mapping[str, tuple[object, ...]]] = {
    "model_type": ("gliner_uni_encoder_span", "gliner", "", None),
    "span_mode": ("markerV0",),
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "post_fusion_schema": ("", None),
    "fuse_layers": (False, None),
    "precomputed_prompts_mode": (False, None),
    "labels_encoder": (None, ""),
    "labels_decoder": (None, ""),
    "relations_layer": (None, ""),
}
"""Values that the forward of `model.py` computes, by field. The first is the default of the library gliner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlinerSettings:
    """A checked `gliner_config.json`."""

    encoder: Mapping[str, Any]
    """Config of the encoder, as transformers has it."""
    hidden_size: int
    """Width of the vectors of words and labels."""
    max_width: int
    """Most words of an entity."""
    max_words: int
    """Most words of a text."""
    lstm_layers: int
    """Layers of the LSTM over words. 0: there is none."""
    label_token: str
    """Token before each label in the prompt."""
    end_token: str
    """Token between the labels and the text."""
    label_token_id: int
    reads_label_token: bool
    """A label's vector is that of `label_token`. False: that of the token after it."""


def read_settings(folder: Path) -> GlinerSettings:
    """Read the settings of a folder.

    Raises:
        ConfigError: The file is missing or malformed, or asks for another architecture; the message names the field.
    """
    try:
        content = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder}: {FILE} is missing: this is no folder of a GLiNER model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FILE}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{FILE}: must be an object")
    for field, known in _ONLY.items():
        if content.get(field, known[0]) not in known:
            raise ConfigError(f"{FILE}: {field}={content[field]!r} is not supported, only {known[0]!r}")
    encoder = content.get("encoder_config")
    if not isinstance(encoder, dict):
        raise ConfigError(
            f"{FILE}: encoder_config is missing, so the encoder {content.get('model_name')!r} is not described: save "
            "the model again with a newer gliner"
        )
    encoder = {"model_type": "deberta-v2", **encoder}
    if (rows := content.get("vocab_size", -1)) != -1:
        encoder["vocab_size"] = rows
    return GlinerSettings(
        encoder=encoder,
        hidden_size=_whole(content, "hidden_size", 512),
        max_width=_whole(content, "max_width", 12),
        max_words=_whole(content, "max_len", 384),
        lstm_layers=_whole(content, "num_rnn_layers", 1, least=0),
        label_token=_text(content, "ent_token", "<<ENT>>"),
        end_token=_text(content, "sep_token", "<<SEP>>"),
        label_token_id=_whole(content, "class_token_index", None),
        reads_label_token=bool(content.get("embed_ent_token", True)),
    )


def _whole(content: Mapping[str, Any], field: str, usual: int | None, least: int = 1) -> int:
    value = content.get(field, usual)
    if type(value) is not int or value < least:
        raise ConfigError(f"{FILE}: {field}={value!r} must be a whole number of at least {least}")
    return value


def _text(content: Mapping[str, Any], field: str, usual: str) -> str:
    value = content.get(field, usual)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{FILE}: {field}={value!r} must be a text")
    return value
