"""Rerankers that read images in queries and documents: Qwen3-VL-Reranker, and jina-reranker-m0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.config import Task
from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.common_files import read_body_config
from staged_pool.runtime.models.folders.engine_retrievers import files_with
from staged_pool.runtime.models.folders.reranker_families import QWEN3_VL
from staged_pool.runtime.models.specs.conversation import ImageSpec
from staged_pool.runtime.models.specs.layers import LayersScoreSpec, Projection
from staged_pool.runtime.models.specs.model import LogitScoreSpec, ModelFolder
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.stages.errors import ConfigError

_CLASS: Final = "Qwen3VLForConditionalGeneration"
"""Class of transformers with the logits of answers."""


_JINA_CLASS: Final = "JinaVLForRanking"

_JINA_FORM: Final = PairTemplate(
    text="**Document**:\n{document}\n**Query**:\n{query}",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    end=(100,),
)
"""Prompt of jina-reranker-m0, and its score token: `modeling.py` of https://huggingface.co/jinaai/jina-reranker-m0."""

_JINA_OFFSET: Final = -2.65
_JINA_PIXELS: Final = (3136, 602112)
_JINA_TOKENS: Final = 10240
"""Offset of scores, pixels of an image, and longest pair, from the same file."""


def is_jina_m0(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of jina-reranker-m0, or of a model trained from it."""
    return class_name(config) == _JINA_CLASS


def read_jina_m0(path: Path, task: Task) -> ModelFolder:
    """Read jina-reranker-m0: a Qwen2-VL whose last token's vector goes through two layers.

    Raises:
        ConfigError: A file is missing or malformed, or the folder is not for `task`.
    """
    config = read_body_config(path, root=path)
    if (kind := config.get("model_type")) != "qwen2_vl":
        raise ConfigError(f"config.json: {_JINA_CLASS} is supported with model_type='qwen2_vl', not {kind!r}")
    if task not in ("auto", "score"):
        raise ConfigError(f"task={task!r}: {_JINA_CLASS} scores pairs, and was trained for nothing else")
    native = {name: value for name, value in config.items() if name != "auto_map"}
    layers = tuple(
        Projection(
            files=files_with(path, f"score.{place}.weight"), weight=f"score.{place}.weight", bias=f"score.{place}.bias"
        )
        for place in (0, 2)
    )
    return ModelFolder(
        path=path,
        body=path,
        config={**native, "architectures": ["Qwen2VLForConditionalGeneration"]},
        architecture="vision-language model",
        heads=(LayersScoreSpec(layers=layers, offset=_JINA_OFFSET),),
        scoring="cross-encoder",
        labels=("LABEL_0",),
        activation="sigmoid",
        pair_template=_JINA_FORM,
        max_seq_length=_JINA_TOKENS,
        prompts={},
        images=ImageSpec(frame=None, takes_conversations=True, pixels=_JINA_PIXELS),
        notes=("read as jina-reranker-m0, as its class says; score: the sigmoid of its layers' output less 2.65",),
    )


def is_image_reranker(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a possible reranker of texts and images."""
    return config.get("model_type") == QWEN3_VL.model_type


def with_media_texts(template: PairTemplate, config: Mapping[str, Any]) -> PairTemplate:
    """Add the texts of an image and a video to a prompt of pairs."""
    form = QWEN3_VL.form  # other models read texts alone
    if not is_image_reranker(config) or not isinstance(form, PairTemplate):
        return template
    return replace(template, image=form.image, video=form.video)


def with_images_in_pairs(folder: ModelFolder) -> ModelFolder:
    """Add the image settings of a reranker that reads images; return any other folder unchanged.

    Raises:
        ConfigError: Its class gives no logits of answers.
    """
    if not is_image_reranker(folder.config) or not any(isinstance(spec, LogitScoreSpec) for spec in folder.heads):
        return folder
    if (name := class_name(folder.config)) != _CLASS:
        raise ConfigError(f"config.json: architectures={[name]!r} gives no logits of answers; a reranker is a {_CLASS}")
    by_script = not (folder.path / "modules.json").is_file()
    images = ImageSpec(frame=None, takes_conversations=True, pixels=QWEN3_VL.pixels if by_script else None)
    return replace(folder, architecture="vision-language model", images=images)
