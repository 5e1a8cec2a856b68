"""Image model folders: CLIP-like models with a text and an image tower, image encoders and classifiers.

transformers or sentence-transformers writes them. A chain of the latter begins with a CLIPModel, or since version 6
with a Transformer whose `modality_config` describes texts and images.
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
class _TextTower:
    """Pooling, projection and padding of the text tower of a model with two towers."""

    architecture: str
    pooling: PoolingMode | EndPooling
    projection: str
    pads: bool
    """True if each text is padded to the longest input."""


_TWO_TOWERS: Final[Mapping[str, _TextTower]] = {
    "clip": _TextTower("CLIPModel", "end", "text_projection", False),
    "metaclip_2": _TextTower("MetaClip2Model", "end", "text_projection", False),
    "aimv2": _TextTower("Aimv2Model", "end", "text_projection", False),
    "siglip": _TextTower("SiglipModel", "lasttoken", "text_model.head", True),
    "siglip2": _TextTower("Siglip2Model", "lasttoken", "text_model.head", True),
}
"""Text towers by `model_type`.

SigLIP was trained on texts padded to 64 tokens: https://huggingface.co/docs/transformers/model_doc/siglip.
"""

_ENCODERS: Final = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit")

_CLASSIFIERS: Final = ("ForImageClassification", "ForImageClassificationWithTeacher")
"""Name endings of the classes of image classifiers, for every `model_type` of transformers."""

_FEATURES: Final = {
    "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
    "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
}
_TOKENS: Final = {"image": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""Methods and outputs of transformers classes that sentence-transformers uses, by modality."""


def supported_image_models() -> tuple[str, ...]:
    """Values of `model_type` of the supported image models."""
    return (*_TWO_TOWERS, *_ENCODERS)


def is_image_folder(path: Path, modules_file: JsonFile | None) -> bool:
    """True for the folder of an image model."""
    chain = [("Transformer", path)] if modules_file is None else read_chain(modules_file, path)
    if not chain:
        return False
    name, body = chain[0]
    config = JsonFile.read(body / "config.json", root=path) or JsonFile.empty()
    kind = config.content.get("model_type")
    return name == "CLIPModel" or kind in _TWO_TOWERS or kind in _ENCODERS or _is_classifier(config.content)


def read_image_folder(path: Path, modules_file: JsonFile | None, settings: JsonFile, task: Task) -> ModelFolder:
    """Read the folder of an image model.

    Args:
        path: The model folder.
        modules_file: Its `modules.json`.
        settings: Its `config_sentence_transformers.json`.
        task: See `EngineConfig`.

    Raises:
        ConfigError: A file is missing or malformed (named with its field), or a module or model is not supported.
    """
    chain = [("Transformer", path)] if modules_file is None else read_chain(modules_file, path)
    name, body = chain[0]
    if name not in ("Transformer", "CLIPModel"):
        raise ConfigError(f"modules.json: must begin with a Transformer or a CLIPModel, but begins with {name}")
    config = read_body_config(body, root=path)
    kind = config.get("model_type")
    if task in ("score", "sparse"):
        raise ConfigError(f"task={task!r}: {path.name} is an image model (model_type={kind!r})")
    if _is_classifier(config) and modules_file is None and task != "embed":
        return _classifier(path, config)
    if kind not in _TWO_TOWERS and kind not in _ENCODERS:
        known = ", ".join(supported_image_models())
        raise ConfigError(f"config.json: model_type={kind!r} is not supported; supported image models: {known}")
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
    return class_name(config).endswith(_CLASSIFIERS)


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
    text_tower: _TextTower,
    chain: list[tuple[str, Path]] | None,
    settings: JsonFile,
    common: Mapping[str, Any],
    truncate_dim: int | None,
) -> ModelFolder:
    """Build the settings of a model that embeds texts and images into one space."""
    path, body, config = common["path"], common["body"], common["config"]
    if (name := class_name(config)) not in (text_tower.architecture, ""):
        raise ConfigError(f"config.json: architectures names {name}, but only {text_tower.architecture} is supported")
    transformer = read_transformer_settings(body, root=path)
    _check_modalities(transformer, _FEATURES, "sentence_embedding")
    _check_processing(transformer, pads=text_tower.pads)
    modules, normalize = ((), True) if chain is None else read_head(chain[1:], root=path)
    notes = ("no modules.json: vectors are normalised, as in the model's own class",) if chain is None else ()
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        **common,
        architecture="two towers",
        heads=(
            DenseSpec(
                pooling=(text_tower.pooling,),
                modules=(OwnLayer(text_tower.projection), *modules),
                normalize=normalize,
                truncate_dim=truncate_dim,
            ),
        ),
        image_heads=(OwnVectorSpec(modules=modules, normalize=normalize, truncate_dim=truncate_dim),),
        pads_texts=text_tower.pads,
        max_seq_length=read_max_seq_length(transformer),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
        notes=notes,
    )


def _encoder(chain: list[tuple[str, Path]] | None, common: Mapping[str, Any], truncate_dim: int | None) -> ModelFolder:
    """Build the settings of an image encoder without a text tower."""
    path, body = common["path"], common["body"]
    transformer = read_transformer_settings(body, root=path)
    _check_modalities(transformer, _TOKENS, "token_embeddings")
    _check_processing(transformer, pads=False)
    read_max_seq_length(transformer)
    notes: tuple[str, ...] = ()
    pooling: tuple[PoolingMode, ...] = ("cls",)
    modules: tuple[HeadModule, ...] = ()
    normalize = False
    if chain is None:
        notes = ("no modules.json: cls pooling without normalisation is assumed",)
    else:
        if len(chain) < 2 or chain[1][0] != "Pooling":
            names = " -> ".join(name for name, _ in chain)
            raise ConfigError(f"modules.json: the Transformer must be followed by a Pooling, but the chain is {names}")
        pooling = read_pooling_modes(required(chain[1][1] / "config.json", root=path))
        modules, normalize = read_head(chain[2:], root=path)
    head = DenseSpec(pooling=pooling, modules=modules, normalize=normalize, truncate_dim=truncate_dim)
    return ModelFolder(
        **common,
        architecture="image encoder",
        decided_by="assumed" if chain is None else "folder",
        heads=(),
        image_heads=(head,),
        prompts={},
        notes=notes,
    )


def _check_modalities(transformer: JsonFile, expected: Mapping[str, Mapping[str, str]], output: str) -> None:
    """Reject a Transformer module that uses other methods or outputs of its model."""
    if transformer.get("transformer_task", str, "feature-extraction") != "feature-extraction":
        raise ConfigError(f"{transformer.name}: transformer_task must be feature-extraction for embeddings")
    for kind, asked in transformer.get("modality_config", dict, {}).items():
        if asked != expected.get(kind):
            raise ConfigError(f"{transformer.name}: modality_config: {kind} is not supported as {asked!r}")
    if (name := transformer.get("module_output_name", str, output)) != output:
        raise ConfigError(f"{transformer.name}: module_output_name={name!r} is not supported, only {output}")


def _check_processing(transformer: JsonFile, *, pads: bool) -> None:
    """Reject processor settings, except the padding that a text tower does anyway."""
    for kind, arguments in transformer.get("processing_kwargs", dict, {}).items():
        is_default = pads and kind == "text" and arguments == {"padding": "max_length"}
        if arguments and not is_default:
            raise ConfigError(f"{transformer.name}: processing_kwargs: {kind} is not supported")
