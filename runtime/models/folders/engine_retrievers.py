"""Page retrievers in the layout of colpali-engine: ColQwen2, ColQwen2.5, ColQwen3, ColIdefics3 and ColModernVBert.

Such a folder has the config of a vision-language model, and one more linear layer among its weights. Here it is
described as a retriever of transformers, whose body may be any of these models: `ColQwen2ForRetrieval`, or for images
in tiles `ColModernVBertForRetrieval`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.folders.adapters import ADAPTER, WEIGHTS
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.lfs_pointer import check_fetched
from staged_pool.stages.errors import ConfigError

ENGINE_RETRIEVERS: Final[dict[str, str]] = {
    "ColQwen2": "qwen2_vl",
    "ColQwen2_5": "qwen2_5_vl",
    "ColQwen3": "qwen3_vl",
}
"""Classes of colpali-engine, and the `model_type` of their bodies."""

TILED_RETRIEVERS: Final[dict[str, str]] = {"ColIdefics3": "idefics3", "ColModernVBert": "modernvbert"}
"""The same for models that see an image in tiles. ColSmol is a ColIdefics3."""

_DESCRIBED: Final[Mapping[str, str]] = {
    "colqwen2": "ColQwen2ForRetrieval",
    "colmodernvbert": "ColModernVBertForRetrieval",
}
"""Classes of transformers that such folders are described as, by `model_type`."""

_SAVED_LAYER: Final = re.compile(
    r"^base_model\.model\.(?:model\.)?(?:custom_text_proj|embedding_proj_layer|linear)(?:\.modules_to_save(?:\.default)?)?\.weight$"
)
"""Name of that layer in an adapter with `modules_to_save`."""

OWN_CLASS: Final = "colqwen3"
"""`model_type` of ColQwen3 in folders with a class of their own, as of TomoroAI."""

ENGINE_NAMES: Final[Mapping[str, str]] = {
    r"^(?:vlm\.)?(?:model\.)?(language_model|visual)\.": r"vlm.\1.",
    r"^(?:vlm\.)?model\.(layers|embed_tokens|norm)\.": r"vlm.language_model.\1.",
    r"^vlm\.lm_head\.": "lm_head.",
    r"^(?:vlm\.)?(?:model\.)?(vision_model|connector|text_model)\.": r"vlm.\1.",
    r"^(?:custom_text_proj|linear)\.": "embedding_proj_layer.",
}
"""Names of weights in these classes, by patterns of their names in these folders."""

_LAYERS: Final = ("custom_text_proj.weight", "embedding_proj_layer.weight", "linear.weight")
"""Name of the linear layer: that of colpali-engine, that of transformers, and that of ColIdefics3."""


def with_trained_class(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the class of colpali-engine in a config, if an adapter brings the linear layer; else return it unchanged.

    Args:
        path: A folder that may be composed of an adapter and a base model without that layer.
        config: `config.json`, that of the base model.
    """
    kind = config.get("model_type")
    name = next((name for name, body in (ENGINE_RETRIEVERS | TILED_RETRIEVERS).items() if body == kind), None)
    if name is None or _rows_of_adapter(path) is None:
        return config
    return {**config, "architectures": [name]}


def with_engine_config(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a folder as that of a retriever of transformers.

    Args:
        path: The folder.
        config: Its `config.json`.

    Raises:
        ConfigError: The weights lack the linear layer.
    """
    body = {name: value for name, value in config.items() if name not in ("auto_map", "architectures")}
    if body["model_type"] == OWN_CLASS:
        body["model_type"] = ENGINE_RETRIEVERS["ColQwen3"]
    kind = "colmodernvbert" if body["model_type"] in TILED_RETRIEVERS.values() else "colqwen2"
    return {
        "model_type": kind,
        "architectures": [_DESCRIBED[kind]],
        "vlm_config": body,
        "embedding_dim": _projection_width(path),
    }


def is_engine_config(config: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """True if `config` is made by `with_engine_config` from the content of `config.json`."""
    kind = config.get("model_type")
    return kind in _DESCRIBED and file.get("model_type") != kind


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
    if (rows := _rows_of_adapter(path)) is not None:
        return rows
    for place in dict.fromkeys(file for layer in _LAYERS for file in files_with(path, layer)):
        try:
            check_fetched(place, place.name)
            with safe_open(place, "pt") as file:
                for layer in set(_LAYERS).intersection(file.keys()):
                    return int(file.get_slice(layer).get_shape()[0])
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{place.name}: cannot be read: {error}") from error
    raise ConfigError(
        f"{path.name}: a page retriever of colpali-engine must have {_LAYERS[0]} in its weights (model.safetensors)"
    )


def _rows_of_adapter(path: Path) -> int | None:
    """Return the rows of the linear layer that an adapter saves as a whole. None: it saves none."""
    place = path / ADAPTER / WEIGHTS[0]
    if not place.is_file():
        return None
    try:
        with safe_open(place, "pt") as file:
            found = next((name for name in file.keys() if _SAVED_LAYER.match(name)), None)  # noqa: SIM118
            return None if found is None else int(file.get_slice(found).get_shape()[0])
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{place.name}: cannot be read: {error}") from error
