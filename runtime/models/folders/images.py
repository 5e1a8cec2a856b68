"""Read the folder of a model that has a tower for images: CLIP and its relatives, which have another one for texts,
and encoders and classifiers of images.

Such folders are written by transformers, or by sentence-transformers: a chain that begins with a CLIPModel, or since
version 6 with a Transformer that says what it does with texts and images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.config import Task
from staged_pool.runtime.models.folders.classifier import class_name, read_image_classifier
from staged_pool.runtime.models.folders.common_files import (
    read_body_config,
    read_chain,
    read_matryoshka,
    read_prompts,
    read_similarity,
    read_transformer_settings,
    required,
)
from staged_pool.runtime.models.folders.pooling_modules import read_head, read_pooling_modes
from staged_pool.runtime.models.folders.transformer_settings import read_max_seq_length
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    EndPooling,
    HeadModule,
    LabelsSpec,
    ModelFolder,
    OwnLayer,
    OwnVectorSpec,
    PoolingMode,
)
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Texts:
    """How a model with two towers makes one vector of a text."""

    architecture: str
    pooling: PoolingMode | EndPooling
    projection: str
    fills: bool


_TWO_TOWERS: Final[Mapping[str, _Texts]] = {
    "clip": _Texts("CLIPModel", "end", "text_projection", False),
    "siglip": _Texts("SiglipModel", "lasttoken", "text_model.head", True),
    "siglip2": _Texts("Siglip2Model", "lasttoken", "text_model.head", True),
}
"""By `model_type`. SigLIP was trained on texts of 64 tokens, padding among them:
https://huggingface.co/docs/transformers/model_doc/siglip."""

_ENCODERS: Final = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit")

_CLASSIFIER: Final = "ForImageClassification"

_FEATURES: Final = {
    "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
    "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
}
_TOKENS: Final = {"image": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""What sentence-transformers asks the classes of transformers for."""


def known_models() -> tuple[str, ...]:
    """The models of images that are read, by `model_type`."""
    return (*_TWO_TOWERS, *_ENCODERS)


def is_image_folder(path: Path, modules_file: JsonFile | None) -> bool:
    """Whether a folder is one of these."""
    chain = [("Transformer", path)] if modules_file is None else read_chain(modules_file, path)
    if not chain:
        return False
    name, body = chain[0]
    config = JsonFile.read(body / "config.json", root=path) or JsonFile.empty()
    kind = config.content.get("model_type")
    return name == "CLIPModel" or kind in _TWO_TOWERS or kind in _ENCODERS or _is_classifier(config.content)


def read_image_folder(path: Path, modules_file: JsonFile | None, settings: JsonFile, task: Task) -> ModelFolder:
    """Read such a folder.

    Args:
        path: The folder.
        modules_file: Its `modules.json`.
        settings: Its `config_sentence_transformers.json`.
        task: See `EngineConfig`.

    Raises:
        ConfigError: A file is missing or malformed (named with its field), or a module or model is not known.
    """
    chain = [("Transformer", path)] if modules_file is None else read_chain(modules_file, path)
    name, body = chain[0]
    if name not in ("Transformer", "CLIPModel"):
        raise ConfigError(f"modules.json: must begin with a Transformer or a CLIPModel, begins with {name}")
    config = read_body_config(body, root=path)
    kind = config.get("model_type")
    if task in ("score", "sparse"):
        raise ConfigError(f"task={task!r}: {path.name} is a model of images (model_type={kind!r})")
    if kind not in _TWO_TOWERS and kind not in _ENCODERS:
        known = ", ".join(known_models())
        raise ConfigError(f"config.json: model_type={kind!r} is not a model of images that is supported: {known}")
    if kind in _ENCODERS and _is_classifier(config) and modules_file is None and task != "embed":
        return _classifier(path, config)
    common = {
        "path": path,
        "body": body,
        "config": config,
        "similarity": read_similarity(settings),
        **read_matryoshka(path, config, settings),
    }
    truncate_dim = settings.positive("truncate_dim")
    if isinstance(kind, str) and kind in _TWO_TOWERS:
        return _two_towers(_TWO_TOWERS[kind], chain if modules_file else None, settings, common, truncate_dim)
    return _encoder(chain if modules_file else None, common, truncate_dim)


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return class_name(config).endswith(_CLASSIFIER)


def _classifier(path: Path, config: Mapping[str, Any]) -> ModelFolder:
    labels, activation = read_image_classifier(config)
    return ModelFolder(
        path=path,
        body=path,
        config=config,
        architecture="image classifier",
        heads=(),
        image_heads=(LabelsSpec(),),
        scoring=None,
        labels=labels,
        activation=activation,
        prompts={},
    )


def _two_towers(
    texts: _Texts,
    chain: list[tuple[str, Path]] | None,
    settings: JsonFile,
    common: Mapping[str, Any],
    truncate_dim: int | None,
) -> ModelFolder:
    """A model that brings texts and images to vectors of one space."""
    path, body, config = common["path"], common["body"], common["config"]
    if (name := class_name(config)) not in (texts.architecture, ""):
        raise ConfigError(f"config.json: architectures names {name}, and only {texts.architecture} is supported")
    transformer = read_transformer_settings(body, root=path)
    _check_modalities(transformer, _FEATURES, "sentence_embedding")
    _check_processing(transformer, fills=texts.fills)
    modules, normalize = ((), True) if chain is None else read_head(chain[1:], root=path)
    notes = ("no modules.json: vectors are normalised, as the model itself compares them",) if chain is None else ()
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        **common,
        architecture="two towers",
        heads=(
            DenseSpec(
                pooling=(texts.pooling,),
                modules=(OwnLayer(texts.projection), *modules),
                normalize=normalize,
                truncate_dim=truncate_dim,
            ),
        ),
        image_heads=(OwnVectorSpec(modules=modules, normalize=normalize, truncate_dim=truncate_dim),),
        fills_texts=texts.fills,
        max_seq_length=read_max_seq_length(transformer),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
        notes=notes,
    )


def _encoder(chain: list[tuple[str, Path]] | None, common: Mapping[str, Any], truncate_dim: int | None) -> ModelFolder:
    """A model of images alone."""
    path, body = common["path"], common["body"]
    transformer = read_transformer_settings(body, root=path)
    _check_modalities(transformer, _TOKENS, "token_embeddings")
    _check_processing(transformer, fills=False)
    read_max_seq_length(transformer)
    notes: tuple[str, ...] = ()
    pooling: tuple[PoolingMode, ...] = ("cls",)
    modules: tuple[HeadModule, ...] = ()
    normalize = False
    if chain is None:
        notes = ("no modules.json: the class token's vector is taken, without normalisation",)
    else:
        if len(chain) < 2 or chain[1][0] != "Pooling":
            names = " -> ".join(name for name, _ in chain)
            raise ConfigError(f"modules.json: the Transformer must be followed by a Pooling, the chain is {names}")
        pooling = read_pooling_modes(required(chain[1][1] / "config.json", root=path))
        modules, normalize = read_head(chain[2:], root=path)
    head = DenseSpec(pooling=pooling, modules=modules, normalize=normalize, truncate_dim=truncate_dim)
    return ModelFolder(
        **common,
        architecture="image encoder",
        reading="assumed" if chain is None else "folder",
        heads=(),
        image_heads=(head,),
        prompts={},
        notes=notes,
    )


def _check_modalities(transformer: JsonFile, expected: Mapping[str, Mapping[str, str]], output: str) -> None:
    """Refuse a Transformer of sentence-transformers that asks its model for something else."""
    if transformer.get("transformer_task", str, "feature-extraction") != "feature-extraction":
        raise ConfigError(f"{transformer.name}: transformer_task must be feature-extraction for embeddings")
    for kind, asked in transformer.get("modality_config", dict, {}).items():
        if asked != expected.get(kind):
            raise ConfigError(f"{transformer.name}: modality_config: {kind} is not supported as {asked!r}")
    if (name := transformer.get("module_output_name", str, output)) != output:
        raise ConfigError(f"{transformer.name}: module_output_name={name!r} is not supported, only {output}")


def _check_processing(transformer: JsonFile, *, fills: bool) -> None:
    """Refuse settings of processors, but for those that say what is done here anyway."""
    for kind, arguments in transformer.get("processing_kwargs", dict, {}).items():
        done = fills and kind == "text" and arguments == {"padding": "max_length"}
        if arguments and not done:
            raise ConfigError(f"{transformer.name}: processing_kwargs: {kind} is not supported")
