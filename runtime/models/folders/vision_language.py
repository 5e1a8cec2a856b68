"""Read what a folder says of a language model that is shown images between texts.

Two kinds are known: models of the family of Qwen2-VL, whose last token's vector stands for a conversation; and models
of late interaction that read a page as an image (Faysse et al., 2024, ColPali, https://arxiv.org/abs/2407.01449), as
transformers has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.model import Role
from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.common_files import read_body_config, read_transformer_settings
from staged_pool.runtime.models.folders.special_tokens import read_special_token
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ImageSpec, ModelFolder, MultiVectorSpec, RoleSettings
from staged_pool.runtime.models.tokenizing.chat import without_marks
from staged_pool.stages.errors import ConfigError

CONVERSING: Final[Mapping[str, str]] = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
"""Models that read conversations with images: `model_type`, and how their classes in transformers begin."""

PAGE_RETRIEVERS: Final = ("ColQwen2ForRetrieval", "ColPaliForRetrieval")
"""Classes of transformers that read pages."""

_IMAGE: Final = "<|image_pad|>"
_QWEN_PAGE: Final = (
    f"<|im_start|>user\n<|vision_start|>{_IMAGE}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)
"""What ColQwen2 was trained to see around a page: `ColQwen2Processor` of transformers."""

_EXPANSIONS: Final = 10
"""Padding tokens behind a query, in both models' processors: room for the model to think."""


def is_page_retriever(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a model of late interaction with pages."""
    return class_name(config) in PAGE_RETRIEVERS


def with_images(folder: ModelFolder) -> ModelFolder:
    """The folder with what it says of images; as it was where it is shown none.

    Raises:
        ConfigError: It is of a model that is shown images in a way that is not known here, whose texts might not be
            read as it wants either.
    """
    kind, name = folder.config.get("model_type"), class_name(folder.config)
    family = CONVERSING.get(str(kind))
    if family is None:
        if "vision_config" in folder.config:
            raise ConfigError(
                f"config.json: model_type={kind!r} ({name}) reads images in a way that is not supported; of models of "
                f"texts and images only {', '.join((*CONVERSING, *PAGE_RETRIEVERS))} and clip, siglip, siglip2 are"
            )
        return folder
    known = (f"{family}Model", f"{family}ForConditionalGeneration")
    if name not in known:  # such as ColQwen2 of another library
        raise ConfigError(
            f"config.json: architectures={[name]!r} is not supported for model_type={kind!r}, only {', '.join(known)}; "
            f"of models for pages, {' and '.join(PAGE_RETRIEVERS)}"
        )
    return replace(folder, architecture="vision-language model", images=ImageSpec(alone=None, converses=True))


def read_page_folder(path: Path) -> ModelFolder:
    """Read the folder of a `ColQwen2ForRetrieval` or a `ColPaliForRetrieval`.

    Raises:
        ConfigError: A file is missing or malformed; names it.
    """
    config = read_body_config(path, root=path)
    processor = JsonFile.read(path / "processor_config.json", root=path) or JsonFile.empty()
    padding = read_special_token(path, "pad_token", root=path)
    if padding is None:
        raise ConfigError("tokenizer_config.json: pad_token is missing, which goes behind every query")
    behind = padding * _EXPANSIONS + "\n"
    if class_name(config) == "ColQwen2ForRetrieval":
        page = processor.get("visual_prompt_prefix", str, None) or _QWEN_PAGE
        if page.count(_IMAGE) != 1:
            raise ConfigError(f"{processor.name}: visual_prompt_prefix must have one {_IMAGE}, where the image goes")
        before, _, after = page.partition(_IMAGE)
        alone, prefix, first = (before, after), "Query: ", ""
    else:
        first = read_special_token(path, "bos_token", root=path) or "<bos>"
        page = processor.get("visual_prompt_prefix", str, None) or "Describe the image."
        alone, prefix = ("", f"{first}{page}\n"), "Question: "
    roles: dict[Role, RoleSettings] = {
        "query": RoleSettings(frame=(first, behind)),
        "document": RoleSettings(frame=(first, "")),
    }
    return ModelFolder(
        path=path,
        body=path,
        config=config,
        architecture="vision-language model",
        heads=(MultiVectorSpec(own_layer="embedding_proj_layer"),),
        scoring="late-interaction",
        max_seq_length=read_transformer_settings(path, root=path).positive("max_seq_length"),
        prompts={"query": processor.get("query_prefix", str, None) or prefix},
        roles=roles,
        images=ImageSpec(alone=alone, converses=False, words=_words(page)),
    )


def _words(page: str) -> tuple[str, ...]:
    """Spellings of the visual prompt that clients send beside an image: vLLM's examples send what it says behind it."""
    behind = page.partition(_IMAGE)[2] or page
    return tuple(dict.fromkeys(without_marks(part) for part in (behind, page)))
