"""Page retrievers in the layout of colpali-engine: ColQwen2, ColQwen2.5 and ColQwen3.

Such a folder has the config of a Qwen-VL model, and one more linear layer among its weights. Here it is described as
`ColQwen2ForRetrieval` of transformers, whose body may be any of these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

ENGINE_RETRIEVERS: Final[Mapping[str, str]] = {
    "ColQwen2": "qwen2_vl",
    "ColQwen2_5": "qwen2_5_vl",
    "ColQwen3": "qwen3_vl",
}
"""Classes of colpali-engine, and the `model_type` of their bodies."""

OWN_CLASS: Final = "colqwen3"
"""`model_type` of ColQwen3 in folders with a class of their own, as of TomoroAI."""

ENGINE_NAMES: Final[Mapping[str, str]] = {
    r"^(?:vlm\.)?(?:model\.)?(language_model|visual)\.": r"vlm.\1.",
    r"^(?:vlm\.)?model\.(layers|embed_tokens|norm)\.": r"vlm.language_model.\1.",
    r"^vlm\.lm_head\.": "lm_head.",
    r"^custom_text_proj\.": "embedding_proj_layer.",
}
"""Names of weights in `ColQwen2ForRetrieval`, by patterns of their names in these folders."""

_LAYERS: Final = ("custom_text_proj.weight", "embedding_proj_layer.weight")
"""Name of the linear layer: that of colpali-engine, and that of transformers."""


def with_engine_config(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a folder as that of a `ColQwen2ForRetrieval`.

    Args:
        path: The folder.
        config: Its `config.json`.

    Raises:
        ConfigError: The weights lack the linear layer.
    """
    body = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    if body["model_type"] == OWN_CLASS:
        body["model_type"] = ENGINE_RETRIEVERS["ColQwen3"]
    return {
        "model_type": "colqwen2",
        "architectures": ["ColQwen2ForRetrieval"],
        "vlm_config": body,
        "embedding_dim": _projection_width(path),
    }


def is_engine_config(config: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """True if `config` is made by `with_engine_config` from the content of `config.json`."""
    return config.get("model_type") == "colqwen2" and file.get("model_type") != "colqwen2"


def files_with(path: Path, name: str) -> tuple[Path, ...]:
    """Return the weight file that has a tensor, by the index of the folder; without an index, its only file."""
    index = JsonFile.read(path / "model.safetensors.index.json", root=path)
    if index is None:
        return (path / "model.safetensors",)
    file = index.get("weight_map", dict, {}).get(name)
    return () if file is None else (path / str(file),)


def _projection_width(path: Path) -> int:
    """Return the values of a vector: rows of the linear layer.

    Raises:
        ConfigError: It is not among the weights.
    """
    for place in dict.fromkeys(file for layer in _LAYERS for file in files_with(path, layer)):
        try:
            with safe_open(place, "pt") as file:
                for layer in set(_LAYERS).intersection(file.keys()):
                    return int(file.get_slice(layer).get_shape()[0])
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{place.name}: cannot be read: {error}") from error
    raise ConfigError(
        f"{path.name}: a page retriever of colpali-engine must have {_LAYERS[0]} in its weights (model.safetensors)"
    )
