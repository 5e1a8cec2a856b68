"""Vision-language model folders: embeddings of the Qwen-VL families, and ColPali-like page retrievers.

Models of the Qwen-VL families embed a conversation by its last token. Page retrievers are late interaction models that
read a page as an image (Faysse et al., 2024, ColPali, https://arxiv.org/abs/2407.01449), as classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.card import Role
from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.common_files import read_body_config, read_transformer_settings
from staged_pool.runtime.models.folders.engine_retrievers import (
    ENGINE_RETRIEVERS,
    OWN_CLASS,
    with_engine_config,
    with_trained_class,
)
from staged_pool.runtime.models.folders.special_tokens import read_special_token
from staged_pool.runtime.models.folders.tiled_retrievers import ignored_texts, is_tiled_retriever, read_tiled_folder
from staged_pool.runtime.models.folders.vision_embedders import (
    IMAGE,
    QWEN3_VL_EMBEDDING,
    QWEN_PAGE,
    VISION_CHAT_MODELS,
    find_embedder,
)
from staged_pool.runtime.models.specs.conversation import ConversationForm, ImageSpec
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder, MultiVectorSpec, RoleSettings
from staged_pool.stages.errors import ConfigError

PAGE_RETRIEVERS: Final = ("ColQwen2ForRetrieval", "ColPaliForRetrieval", "ColModernVBertForRetrieval")
"""Transformers classes of page retrievers."""

_QWEN3_FORM: Final = ConversationForm(
    instruction="Represent the user's input.", ends_sentence=True, empty="NULL", add_generation_prompt=True
)
"""Inputs of Qwen3-VL-Embedding, from its `source`."""

_QWEN3_PIXELS: Final = (4 * 32**2, 1800 * 32**2)
"""Fewest and most pixels of its images, from the same file."""

_OWN_PIXELS: Final = (4 * 32**2, 1280 * 32**2)
"""Fewest and most pixels of a page, from `processing_colqwen3.py` of TomoroAI's folders."""

_FORWARD: Final = {"method": "forward", "method_output_name": "last_hidden_state"}

_EXPANSIONS: Final = 10
"""Padding tokens after a query, as in both models' processors (query augmentation)."""


def is_page_retriever(path: Path) -> bool:
    """True for the folder of a page retriever, by its `config.json` or its adapter."""
    config = _page_config(path)
    name = class_name(config)
    return (
        name in PAGE_RETRIEVERS
        or is_tiled_retriever(config)
        or (name in ENGINE_RETRIEVERS and config.get("model_type") in (ENGINE_RETRIEVERS[name], OWN_CLASS))
    )


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
    if kind == "paddleocr_vl":  # its repository brings code from before transformers had the class
        folder = replace(folder, config={key: value for key, value in folder.config.items() if key != "auto_map"})
    by_script = kind == "qwen3_vl" and not (folder.path / "modules.json").is_file()
    if by_script:
        _, evidence = find_embedder(folder.path, folder.config) or (None, "task='embed' alone says")
        note = f"read as {QWEN3_VL_EMBEDDING.name}, as {evidence}; vectors: {QWEN3_VL_EMBEDDING.way}"
        folder = replace(folder, notes=(f"{note}, as in {QWEN3_VL_EMBEDDING.source}",))
    return replace(
        folder,
        architecture="vision-language model",
        conversation=_QWEN3_FORM if by_script else folder.conversation,
        images=ImageSpec(frame=None, takes_conversations=True, pixels=_QWEN3_PIXELS if by_script else None),
    )


def read_conversation_form(config: Mapping[str, Any], transformer: JsonFile) -> ConversationForm | None:
    """Read the form of inputs from a sentence-transformers folder of a vision-language model.

    Such a folder has the modality `message`: its library then renders every input by the chat template.

    Args:
        config: `config.json`.
        transformer: `sentence_bert_config.json`.

    Returns:
        The form. None: the folder is of another kind.

    Raises:
        ConfigError: A field is malformed, or a setting is not supported.
    """
    modalities = transformer.get("modality_config", dict, {})
    if config.get("model_type") not in VISION_CHAT_MODELS or "message" not in modalities:
        return None
    for kind, asked in modalities.items():
        given = {name: value for name, value in asked.items() if name != "format"} if isinstance(asked, dict) else asked
        if given != _FORWARD:
            raise ConfigError(
                f"{transformer.name}: modality_config: {kind} is not supported as {asked!r}, only last_hidden_state of "
                "forward"
            )
    if (name := transformer.get("module_output_name", str, "token_embeddings")) != "token_embeddings":
        raise ConfigError(f"{transformer.name}: module_output_name={name!r} is not supported, only token_embeddings")
    processing = JsonFile(f"{transformer.name}: processing_kwargs", transformer.get("processing_kwargs", dict, {}))
    if others := sorted(set(processing.content) - {"chat_template"}):
        raise ConfigError(f"{processing.name}: {others[0]} is not supported, only chat_template")
    arguments = JsonFile(f"{processing.name}: chat_template", processing.get("chat_template", dict, {}))
    if others := sorted(set(arguments.content) - {"add_generation_prompt", "restore_suffix"}):
        raise ConfigError(f"{arguments.name}: {others[0]} is not supported, only add_generation_prompt")
    return ConversationForm(add_generation_prompt=arguments.get("add_generation_prompt", bool, False))


def read_page_folder(path: Path) -> ModelFolder:
    """Read the folder of a page retriever, by its class in transformers or in colpali-engine.

    Raises:
        ConfigError: A file is missing or malformed; the message names it.
    """
    config = _page_config(path)
    if is_tiled_retriever(config):
        return read_tiled_folder(path, config)
    processor = JsonFile.read(path / "processor_config.json", root=path) or JsonFile.empty()
    padding = read_special_token(path, "pad_token", root=path)
    if padding is None:
        raise ConfigError("tokenizer_config.json: pad_token is missing, but it must follow every query")
    suffix, pixels = padding * _EXPANSIONS + "\n", None
    if class_name(config) in ENGINE_RETRIEVERS:
        page, prefix, first, suffix = QWEN_PAGE, "Query: ", "", padding * _EXPANSIONS
        if config.get("model_type") == OWN_CLASS:
            page = "".join(
                processor.get(f"visual_prompt_{part}", str, None) or usual
                for part, usual in zip(("prefix", "suffix"), _split_page(), strict=True)
            )
            prefix, pixels = processor.get("query_prefix", str, None) or "", _OWN_PIXELS
        around = _around_page(page, processor.name)
        config = with_engine_config(path, config)
    elif class_name(config) == "ColQwen2ForRetrieval":
        page = processor.get("visual_prompt_prefix", str, None) or QWEN_PAGE
        around, prefix, first = _around_page(page, processor.name), "Query: ", ""
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
        images=ImageSpec(
            frame=around, takes_conversations=False, pixels=pixels, ignored_texts=ignored_texts(page, IMAGE)
        ),
    )


def _page_config(path: Path) -> Mapping[str, Any]:
    return with_trained_class(path, read_body_config(path, root=path))


def _around_page(page: str, name: str) -> tuple[str, str]:
    """Return the text before and after the image of a page's prompt."""
    if page.count(IMAGE) != 1:
        raise ConfigError(f"{name}: visual_prompt_prefix must have one {IMAGE}, the image's place")
    before, _, after = page.partition(IMAGE)
    return before, after


def _split_page() -> tuple[str, str]:
    """Return the usual prompt of a page up to its end mark, and the rest."""
    before, end, after = QWEN_PAGE.partition("<|im_end|>")
    return before, end + after
