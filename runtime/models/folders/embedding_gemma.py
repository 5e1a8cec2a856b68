"""EmbeddingGemma 2 folders: the config of the text model inside, which is all that is served.

The model reads images, sounds and videos too. Its text model has the projection to the vectors inside, applied to each
token: the mean of the projected vectors is the projected mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

WHOLE: Final = "embedding_gemma2"
"""`model_type` of the whole model."""
TEXT: Final = "embedding_gemma2_text"
"""`model_type` of its text model in transformers."""
KEY_NAMES: Final[Mapping[str, str]] = {r"^(model\.)?language_model\.": ""}
"""Weight names of the text model, by patterns for those of the whole model."""
OTHER_PARTS: Final = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
"""Parts of the whole model that read something else than texts."""


def with_gemma_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model inside; any other config unchanged.

    Raises:
        ConfigError: The whole model is of another class, or its text config is missing.
    """
    if config.get("model_type") != WHOLE:
        return config
    file = JsonFile("config.json", config)
    names = file.get("architectures", list, ["EmbeddingGemma2Model"])
    if names != ["EmbeddingGemma2Model"]:
        raise ConfigError(
            f"config.json: architectures={names!r} is not supported for model_type={WHOLE!r}, only EmbeddingGemma2Model"
        )
    text = file.get("text_config", dict, None)
    if text is None:
        raise ConfigError(f"config.json: text_config is missing, and model_type={WHOLE!r} needs it")
    kept = {name: config[name] for name in ("dtype", "torch_dtype", "matryoshka_dimensions") if name in config}
    return kept | text | {"model_type": TEXT, "architectures": ["EmbeddingGemma2TextModel"]}


def with_gemma_note(folder: ModelFolder) -> ModelFolder:
    """Say in the log that images, sounds and videos are not read; return any other folder unchanged."""
    file = JsonFile.read(folder.body / "config.json", root=folder.path)
    if file is None or file.content.get("model_type") != WHOLE:
        return folder
    note = "texts only: images, sounds and videos of this model are not supported"
    return replace(folder, notes=(*folder.notes, note))
