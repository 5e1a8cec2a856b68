"""Vision-language model folders: Qwen2-VL embeddings, and ColPali-like page retrievers.

Models of the Qwen2-VL family embed a conversation by its last token. Page retrievers are late interaction models that
read a page as an image (Faysse et al., 2024, ColPali, https://arxiv.org/abs/2407.01449), as classes of transformers.
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
from staged_pool.runtime.models.tokenizing.chat import without_special_tokens
from staged_pool.stages.errors import ConfigError

VISION_CHAT_MODELS: Final[Mapping[str, str]] = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
"""Models that read conversations with images: `model_type`, and prefix of the class name in transformers."""

PAGE_RETRIEVERS: Final = ("ColQwen2ForRetrieval", "ColPaliForRetrieval")
"""Transformers classes of page retrievers."""

_IMAGE: Final = "<|image_pad|>"
_QWEN_PAGE: Final = (
    f"<|im_start|>user\n<|vision_start|>{_IMAGE}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)
"""ColQwen2's prompt around a page, from `ColQwen2Processor` of transformers."""

_EXPANSIONS: Final = 10
"""Padding tokens after a query, as in both models' processors (query augmentation)."""


def is_page_retriever(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a page retriever."""
    return class_name(config) in PAGE_RETRIEVERS


def with_images(folder: ModelFolder) -> ModelFolder:
    """Add the image settings of a vision-language model; return the folder of a text model unchanged.

    Raises:
        ConfigError: The model reads images in an unsupported way, so its texts could be read wrongly too.
    """
    kind, name = folder.config.get("model_type"), class_name(folder.config)
    family = VISION_CHAT_MODELS.get(str(kind))
    if family is None:
        if "vision_config" in folder.config:
            supported = ", ".join((*VISION_CHAT_MODELS, *PAGE_RETRIEVERS, "clip", "siglip", "siglip2"))
            raise ConfigError(
                f"config.json: model_type={kind!r} ({name}) reads images in a way that is not supported; "
                f"supported models of text and images: {supported}"
            )
        return folder
    known = (f"{family}Model", f"{family}ForConditionalGeneration")
    if name not in known:  # such as ColQwen2 of another library
        raise ConfigError(
            f"config.json: architectures={[name]!r} is not supported for model_type={kind!r}, only {', '.join(known)}; "
            f"supported page retrievers: {', '.join(PAGE_RETRIEVERS)}"
        )
    return replace(folder, architecture="vision-language model", images=ImageSpec(frame=None, takes_conversations=True))


def read_page_folder(path: Path) -> ModelFolder:
    """Read the folder of a `ColQwen2ForRetrieval` or a `ColPaliForRetrieval`.

    Raises:
        ConfigError: A file is missing or malformed; the message names it.
    """
    config = read_body_config(path, root=path)
    processor = JsonFile.read(path / "processor_config.json", root=path) or JsonFile.empty()
    padding = read_special_token(path, "pad_token", root=path)
    if padding is None:
        raise ConfigError("tokenizer_config.json: pad_token is missing, but it must follow every query")
    suffix = padding * _EXPANSIONS + "\n"
    if class_name(config) == "ColQwen2ForRetrieval":
        page = processor.get("visual_prompt_prefix", str, None) or _QWEN_PAGE
        if page.count(_IMAGE) != 1:
            raise ConfigError(f"{processor.name}: visual_prompt_prefix must have one {_IMAGE}, the image's place")
        before, _, after = page.partition(_IMAGE)
        around, prefix, first = (before, after), "Query: ", ""
    else:
        first = read_special_token(path, "bos_token", root=path) or "<bos>"
        page = processor.get("visual_prompt_prefix", str, None) or "Describe the image."
        around, prefix = ("", f"{first}{page}\n"), "Question: "
    roles: dict[Role, RoleSettings] = {
        "query": RoleSettings(frame=(first, suffix)),
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
        images=ImageSpec(frame=around, takes_conversations=False, ignored_texts=_ignored_texts(page)),
    )


def _ignored_texts(page: str) -> tuple[str, ...]:
    """Texts that a client may send beside a page: the visual prompt, or only its part after the image.

    vLLM's examples send the latter.
    """
    suffix = page.partition(_IMAGE)[2] or page
    return tuple(dict.fromkeys(without_special_tokens(part) for part in (suffix, page)))
