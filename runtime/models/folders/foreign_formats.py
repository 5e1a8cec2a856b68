"""Name the cause where a folder is a model of another library, or of a form that is not read here.

Such a folder lacks `config.json` or its weights, or has them in a form that would be misread. What it has instead tells
what it is: files by their names, and a few fields of `config.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

WEIGHT_FILES: Final = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""Weights of a transformer, under the names that transformers knows."""

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
    ("consolidated*", "only weights in the layout of their authors (consolidated)"),
    ("model-*-of-*.safetensors", "some parts of the weights, but no model.safetensors.index.json that lists them"),
    ("pytorch_model-*-of-*.bin", "some parts of the weights, but no pytorch_model.bin.index.json that lists them"),
    ("model.*.safetensors", "only a variant of the weights; rename it to model.safetensors"),
    ("*.safetensors", "no model.safetensors among its safetensors"),
    ("*.ckpt", "only a training checkpoint"),
    ("*.pt*", "no pytorch_model.bin among its pickled weights"),
)
"""Weights that are not read here, by pattern of the file's name, in the order in which they are told."""

_OWN_FORM: Final = "; fetch or convert it to model.safetensors, in the layout of transformers"

_LIBRARIES: Final[Mapping[str, str]] = {
    "gliner_config.json": "GLiNER, which finds entities of labels that the request names: it is not supported",
    "open_clip_config.json": (
        "open_clip: convert it to the layout of transformers (convert_clip_original_pytorch_to_hf.py), or name a "
        "repository that has it"
    ),
    "model_index.json": "diffusers, which makes images: it is no pooling model",
    "params.json": "a model in the layout of its authors: convert it to the layout of transformers",
}
"""What a folder without `config.json` is of, by a file in it."""

_TIMM: Final = "config.json: the folder is of timm, which is not supported; name one in the layout of transformers"

MODULES: Final[Mapping[str, str]] = {
    "StaticEmbedding": "a table of vectors without a transformer is not supported",
    "Router": "several chains by role are not supported: serve the folder of each chain by itself",
    "Asym": "several chains by role are not supported: serve the folder of each chain by itself",
    "SparseStaticEmbedding": "a table of weights without a transformer is not supported",
    "WordEmbeddings": "models without a transformer are not supported",
    "BoW": "models without a transformer are not supported",
}
"""Modules of sentence-transformers that a chain may begin with, and why it cannot here."""


def check_layout(path: Path) -> None:
    """Reject a folder of another library, or one that holds an adapter alone.

    Raises:
        ConfigError: Names what the folder is, and what would be right.
    """
    config = JsonFile.read(path / "config.json", root=path)
    if config is not None:
        _check_config(config)
        return
    if (path / "modules.json").is_file() and not (path / "adapter_config.json").is_file():
        return
    if (cause := _library(path)) is not None:
        raise ConfigError(cause)


def check_quantization(config: Mapping[str, Any], body: Path) -> None:
    """Reject weights that are quantised: they are not the numbers that the model's class multiplies with.

    Raises:
        ConfigError: Names the method.
    """
    file = JsonFile("config.json", config)
    for name in ("quantization_config", "compression_config"):
        if (given := file.get(name, dict, None)) is not None:
            method = given.get("quant_method", given.get("format", "not said"))
            raise ConfigError(quantised(f"config.json: {name}", str(method)))
    for name, method in (
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
        ("quanto_qmap.json", "quanto"),
    ):
        if (body / name).is_file():
            raise ConfigError(quantised(name, method))


def name_cause(names: Collection[str]) -> str | None:
    """What weights a folder has instead of those that are read here, by the names of its files. None: not known."""
    if any(name in WEIGHT_FILES for name in names):
        return None
    for pattern, cause in _FORMATS:
        if any(fnmatch(PurePosixPath(name).name, pattern) or fnmatch(name, pattern) for name in names):
            return f"{cause}{'' if 'rename' in cause or 'index' in cause else _OWN_FORM}"
    return None


def file_names(path: Path) -> list[str]:
    """Names of the files in a folder and in its folders, relative to it."""
    two_deep = [*path.glob("*"), *path.glob("*/*")]
    return sorted(str(file.relative_to(path).as_posix()) for file in two_deep if file.is_file())


def _check_config(config: JsonFile) -> None:
    kind = config.content.get("model_type")
    if kind == "model2vec" or "StaticModel" in (config.content.get("architectures") or []):
        raise ConfigError(f"config.json: the folder is of model2vec: {MODULES['StaticEmbedding']}")
    if kind == "timm_wrapper" or (
        kind is None and ("pretrained_cfg" in config.content or "num_features" in config.content)
    ):
        raise ConfigError(_TIMM)


def _library(path: Path) -> str | None:
    """What a folder without `config.json` is."""
    adapter = JsonFile.read(path / "adapter_config.json", root=path)
    if adapter is not None:
        base = adapter.content.get("base_model_name_or_path") or "its model"
        kind = adapter.content.get("peft_type", "peft")
        return (
            f"adapter_config.json: the folder holds an adapter alone ({kind}): merge it into the weights of {base} "
            "(merge_and_unload of peft), and serve what that saves"
        )
    for name, cause in _LIBRARIES.items():
        if (path / name).is_file():
            return f"{name}: the folder is of {cause}"
    names = file_names(path)
    if (weights := name_cause([name for name in names if "/" not in name])) is not None:
        return f"{path}: no config.json; found {weights}"
    inner = sorted({name.partition("/")[0] for name in names if fnmatch(name, "*/config.json")})
    if inner:
        return (
            f"{path}: no config.json, so this is not a complete model folder; there is one in {', '.join(inner[:3])}: "
            "name that folder"
        )
    return None


def quantised(where: str, method: str) -> str:
    """The message that rejects quantised weights: the file and field that say so, and the method."""
    return (
        f"{where}: the weights are quantised ({method}), which is not supported: serve the model that they were made "
        "of, and let --dtype bfloat16 halve it"
    )
