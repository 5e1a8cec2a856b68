"""Folders of other libraries and formats, and the reason why each is not supported.

Such a folder lacks `config.json` or supported weights, or its weights would be misread. The names of its files and a
few fields of `config.json` tell the library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.foreign_file import MOST_BYTES, BadFile, check_file

WEIGHT_FILES: Final = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""File names of the weights that transformers loads."""

VOCABULARIES: Final = (
    "tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model",
    "spm.model", "tekken.json",
)  # fmt: skip
"""Vocabulary files that the tokenizer classes of transformers read; one of them is enough."""

_WHOLE: Final = frozenset({".json", ".jinja", ".model"})
"""Endings of files that are read whole, beside vocabularies."""

_FORMATS: Final[tuple[tuple[str, str], ...]] = (
    ("*.gguf", "only weights in GGUF, the format of llama.cpp"),
    ("*.onnx", "only a graph in ONNX"),
    ("*openvino_model.*", "only a graph of OpenVINO"),
    ("*.mlpackage/*", "only a graph of Core ML"),
    ("*.tflite", "only a graph of TensorFlow Lite"),
    ("tf_model*.h5", "only weights of TensorFlow"),
    ("*.h5", "only weights of TensorFlow"),
    ("*.msgpack", "only weights of Flax"),
    ("*.ot", "only weights of rust-bert"),
    ("consolidated*", "only weights in their authors' own layout (consolidated)"),
    ("model-*-of-*.safetensors", "shards of the weights, but no model.safetensors.index.json that lists them"),
    ("pytorch_model-*-of-*.bin", "shards of the weights, but no pytorch_model.bin.index.json that lists them"),
    ("model.*.safetensors", "only a variant of the weights; rename it to model.safetensors"),
    ("*.safetensors", "safetensors files, but no model.safetensors"),
    ("*.ckpt", "only a training checkpoint"),
    ("*.pt*", "pickled weights, but no pytorch_model.bin"),
)
"""Unsupported weight files: file name pattern and description. The first match is reported."""

_CONVERT: Final = "; fetch or convert the weights to model.safetensors in the layout of transformers"

_LIBRARIES: Final[Mapping[str, str]] = {
    "gliner_config.json": (
        "a GLiNER model (entities of labels named by the request), which only a plugin reads: examples/entities"
    ),
    "open_clip_config.json": (
        "an open_clip model: convert it to the layout of transformers (convert_clip_original_pytorch_to_hf.py), or "
        "name a repository that has it"
    ),
    "model_index.json": "a diffusers model, which generates images: it is not a pooling model",
    "params.json": "a model in its authors' own layout: convert it to the layout of transformers",
}
"""Library of a folder without `config.json`, by a file that only this library writes."""

_TIMM: Final = "config.json: this is a timm model, which is not supported; name one in the layout of transformers"

MODULES: Final[Mapping[str, str]] = {
    "Router": "several chains by role are not supported: serve the folder of each chain by itself",
    "Asym": "several chains by role are not supported: serve the folder of each chain by itself",
    "SparseStaticEmbedding": "static token weights without a transformer are not supported",
    "WordEmbeddings": "models without a transformer are not supported",
    "BoW": "models without a transformer are not supported",
}
"""Unsupported first modules of a sentence-transformers chain, and the reason."""


_ENTITY_LIBRARIES: Final[Mapping[str, str]] = {
    "GLiClass": "a GLiClass model (labels named by the request, all in one text)",
    "extractor": "a GLiNER2 model (entities, labels and structures named by the request)",
}
"""Library of a folder by the `model_type` in its `config.json`, which transformers does not know."""


def check_layout(path: Path) -> None:
    """Reject a folder of another library, or with a file without an end.

    Raises:
        ConfigError: Names the library or format, and what to do; or the file, and its fault.
    """
    _check_files(path)
    config = JsonFile.read(path / "config.json", root=path)
    if config is not None:
        _check_config(config)
        return
    if (path / "modules.json").is_file():
        return
    if (cause := _foreign_library(path)) is not None:
        raise ConfigError(cause)


def check_quantization(config: Mapping[str, Any], body: Path) -> None:
    """Reject quantised weights: the model class would multiply with their bare integers.

    Raises:
        ConfigError: Names the quantisation method.
    """
    file = JsonFile("config.json", config)
    for name in ("quantization_config", "compression_config"):
        if (given := file.get(name, dict, None)) is not None:
            unnamed = "mlx" if {"bits", "group_size"} <= given.keys() else "method not named"
            method = given.get("quant_method", given.get("format", unnamed))
            raise ConfigError(quantised_message(f"config.json: {name}", str(method)))
    if isinstance(given := file.content.get("quantization"), dict) and "bits" in given:
        raise ConfigError(quantised_message("config.json: quantization", "mlx"))
    for name, method in (
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
        ("quanto_qmap.json", "quanto"),
    ):
        if (body / name).is_file():
            raise ConfigError(quantised_message(name, method))


def describe_unreadable_weights(names: Collection[str]) -> str | None:
    """Describe a folder's unsupported weights by its file names.

    Returns:
        The description and what to do. None: the folder has supported weights, or none of a known format.
    """
    if any(name in WEIGHT_FILES for name in names):
        return None
    for pattern, cause in _FORMATS:
        if any(fnmatch(PurePosixPath(name).name, pattern) or fnmatch(name, pattern) for name in names):
            return f"{cause}{'' if 'rename' in cause or 'index' in cause else _CONVERT}"
    return None


def _check_files(path: Path) -> None:
    """Reject a pipe, a device, or a huge file that libraries read whole."""
    for file in _two_deep(path):
        is_whole = file.suffix in _WHOLE or file.name in VOCABULARIES
        try:
            if not file.is_dir():
                check_file(file, MOST_BYTES if is_whole else None)
        except BadFile as error:
            raise ConfigError(f"{file.relative_to(path)}: cannot be read: {error}") from error
        except OSError:
            continue  # a link to nothing, such as of a file that the hub's cache does not have


def _two_deep(path: Path) -> list[Path]:
    return [*path.glob("*"), *path.glob("*/*")]


def file_names(path: Path) -> list[str]:
    """Relative names of the files in a folder and its direct subfolders."""
    return sorted(str(file.relative_to(path).as_posix()) for file in _two_deep(path) if file.is_file())


def _check_config(config: JsonFile) -> None:
    kind = config.content.get("model_type")
    if kind == "timm_wrapper" or (
        kind is None and ("pretrained_cfg" in config.content or "num_features" in config.content)
    ):
        raise ConfigError(_TIMM)
    if (cause := _ENTITY_LIBRARIES.get(str(kind))) is not None:
        raise ConfigError(
            f"config.json: model_type={kind!r}: this is {cause}, which is not supported: a plugin can read it with its "
            "own library, as examples/entities does for GLiNER"
        )


def _foreign_library(path: Path) -> str | None:
    """The reason why a folder without `config.json` is not supported; None if it is unknown."""
    for name, cause in _LIBRARIES.items():
        if (path / name).is_file():
            return f"{name}: this is {cause}"
    names = file_names(path)
    if (weights := describe_unreadable_weights([name for name in names if "/" not in name])) is not None:
        return f"{path}: no config.json; found {weights}"
    inner = sorted({name.partition("/")[0] for name in names if fnmatch(name, "*/config.json")})
    if inner:
        return (
            f"{path}: no config.json, so this is not a complete model folder; a subfolder has one: "
            f"{', '.join(inner[:3])}; name that folder"
        )
    return None


def quantised_message(where: str, method: str) -> str:
    """Message that rejects quantised weights.

    Args:
        where: The file, and the field or tensor in it.
        method: The quantisation method.
    """
    return (
        f"{where}: the weights are quantised ({method}), which is not supported: serve the unquantised model, and set "
        "--dtype bfloat16 to halve its memory"
    )
