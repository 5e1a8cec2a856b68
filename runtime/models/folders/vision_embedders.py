"""Known embedding models of texts and images, whose folders do not state their way.

Such a folder has the config of any vision-language model of its class: with another prompt or pooling its vectors look
right and are wrong. So each model is listed here with its authors' way. Another one needs `--task embed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.card import Role
from staged_pool.runtime.config import Task
from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.common_files import (
    read_matryoshka,
    read_prompts,
    read_similarity,
    read_transformer_settings,
)
from staged_pool.runtime.models.folders.readme import model_card
from staged_pool.runtime.models.folders.repository_names import adapter_settings, repository_names
from staged_pool.runtime.models.folders.tiled_retrievers import ignored_texts
from staged_pool.runtime.models.specs.conversation import ImageSpec
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder, PoolingMode, RoleSettings
from staged_pool.stages.errors import ConfigError

VISION_CHAT_MODELS: Final[Mapping[str, str]] = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "paddleocr_vl": "PaddleOCRVL",
}
"""Models that read conversations with images: `model_type`, and prefix of the class name in transformers."""

IMAGE: Final = "<|image_pad|>"
QWEN_PAGE: Final = f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
"""Prompt around a page of ColQwen2 and BiQwen2, from colpali-engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderFamily:
    """Embedding models of one kind, the signs of their folders, and their authors' way."""

    name: str
    source: str
    """URL or file of the authors' code."""
    model_type: str
    class_name: str | None = None
    """Class of the authors' library, in `architectures` or in an adapter's `auto_mapping`. None: there is none."""
    in_card: tuple[str, ...]
    """Texts that identify the model card: one of them is enough."""
    names: re.Pattern[str]
    """Pattern of the folder's or repository's name, in lower case."""
    pooling: PoolingMode = "lasttoken"
    way: str
    """The way of making vectors in words, for the log."""
    page: tuple[str, str] | None = None
    """Text before and after an image that stands alone. None: conversations by the chat template."""
    left_out: str = ""
    """Beginning of the text before an image that the pooling leaves out."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    after_query: str = ""
    """Text behind a query."""


def _bi_qwen(library: str, model_type: str, names: str = r"(?!)") -> EmbedderFamily:
    before, _, after = QWEN_PAGE.partition(IMAGE)
    return EmbedderFamily(
        name=library,
        source=f"colpali-engine 0.3.18, {library} and {library}Processor",
        model_type=model_type,
        class_name=library,
        in_card=(f"{library}.from_pretrained(",),
        names=re.compile(names),
        way="the last token; a query has ten <|endoftext|> behind it",
        page=(before, after),
        prompts={"query": ""},
        after_query="<|endoftext|>" * 10,
    )


def _jina_v4(tasks: str, passage: str) -> EmbedderFamily:
    user = "<|im_start|>user\n"
    return EmbedderFamily(
        name=f"jina-embeddings-v4-vllm-{tasks}",
        source="https://huggingface.co/jinaai/jina-embeddings-v4-vllm-retrieval (README.md)",
        model_type="qwen2_5_vl",
        in_card=tuple(f'model="jinaai/jina-embeddings-v4-vllm-{task}"' for task in tasks.split(" or ")),
        names=re.compile(f"jina-embeddings-v4-vllm-({tasks.replace(' or ', '|')})"),
        pooling="mean",
        way="the mean, for an image that of its tokens and the two marks; texts without a prompt_name are queries",
        page=(f"{user}<|vision_start|>", "<|vision_end|>"),  # tokens see nothing of what stands behind them
        left_out=user,
        prompts={"query": "Query: ", "document": passage, "passage": passage},
        default_prompt="Query: ",
    )


QWEN3_VL_EMBEDDING: Final = EmbedderFamily(
    name="Qwen3-VL-Embedding",
    source="https://github.com/QwenLM/Qwen3-VL-Embedding (src/models/qwen3_vl_embedding.py)",
    model_type="qwen3_vl",
    in_card=("Qwen3VLEmbedder(",),
    names=re.compile(r"qwen3[-_.]?vl[-_.]?embedding"),
    way="the last token of a conversation",
)

_OR_SCORES: Final[Mapping[str, str]] = {"qwen3_vl": " Set task='score' (--task score) for a reranker."}

FAMILIES: Final = (
    _bi_qwen("BiQwen2", "qwen2_vl"),
    _bi_qwen("BiQwen2_5", "qwen2_5_vl", r"(?<!col)nomic-embed-multimodal"),
    _bi_qwen("BiQwen3", "qwen3_vl"),
    _jina_v4("retrieval or code", "Passage: "),
    _jina_v4("text-matching", "Query: "),
    QWEN3_VL_EMBEDDING,
)


def find_embedder(path: Path, config: Mapping[str, Any]) -> tuple[EmbedderFamily, str] | None:
    """Find the family of an embedding model by its class, model card or name.

    Args:
        path: The model folder.
        config: `config.json`.

    Returns:
        The family, and the evidence in words. None: no family is recognised.

    Raises:
        ConfigError: The evidence fits two families.
    """
    families = [family for family in FAMILIES if family.model_type == config.get("model_type")]
    if not families:
        return None
    card, names, classes = model_card(path), repository_names(path, config), _classes(path, config)
    tests: tuple[tuple[str, Callable[[EmbedderFamily], bool]], ...] = (
        ("its class says", lambda family: family.class_name in classes),
        ("its model card says", lambda family: any(text in card for text in family.in_card)),
        ("its name alone says", lambda family: family.names.search(names) is not None),
    )
    for evidence, matches in tests:
        found = [family for family in families if matches(family)]
        if len(found) > 1:
            both = " and ".join(family.name for family in found)
            raise ConfigError(f"{path.name}: is {both}, as {evidence}, but they make vectors in different ways")
        if found:
            return found[0], evidence
    return None


def read_embedder(path: Path, config: Mapping[str, Any], settings: JsonFile, task: Task) -> ModelFolder | None:
    """Read the folder of a known embedding model of texts and images.

    Args:
        path: The model folder.
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        task: See `EngineConfig`.

    Returns:
        The folder. None: its vectors are those of conversations by the chat template, or it reads no images.

    Raises:
        ConfigError: Nothing says how this model of texts and images makes vectors, and the user does not either.
    """
    kind, name = config.get("model_type"), class_name(config)
    if kind not in VISION_CHAT_MODELS:
        return None
    found = find_embedder(path, config)
    if found is None and task != "embed":
        known = ", ".join(family.name for family in FAMILIES)
        raise ConfigError(
            f"config.json: {name or kind} is a model of texts and images, and nothing in {path.name} says how it makes "
            "vectors. Set task='embed' (--task embed) for vectors of conversations, by the chat template and the last "
            f"token, if it was trained for that.{_OR_SCORES.get(str(kind), '')} Known without a setting: {known}"
        )
    if found is None or found[0].page is None:
        return None
    family, evidence = found
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    if name == family.class_name:
        kept["architectures"] = [f"{VISION_CHAT_MODELS[family.model_type]}Model"]
    prompts, _ = read_prompts(settings)
    roles: dict[Role, RoleSettings] = {
        "query": RoleSettings(frame=("", family.after_query)),
        "document": RoleSettings(),
    }
    assert family.page is not None
    return ModelFolder(
        path=path,
        body=path,
        config=kept,
        architecture="vision-language model",
        heads=(
            DenseSpec(
                pooling=(family.pooling,), modules=(), normalize=True, truncate_dim=settings.positive("truncate_dim")
            ),
        ),
        similarity=read_similarity(settings),
        **read_matryoshka(path, config, settings),
        max_seq_length=read_transformer_settings(path, root=path).positive("max_seq_length"),
        prompts={**family.prompts, **prompts},
        default_prompt=family.default_prompt,
        roles=roles if family.after_query else {},
        images=ImageSpec(
            frame=family.page,
            takes_conversations=False,
            left_out=family.left_out,
            ignored_texts=ignored_texts(QWEN_PAGE, IMAGE),
        ),
        notes=(f"read as {family.name}, as {evidence}; vectors: {family.way}, as in {family.source}",),
    )


def _classes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of classes of the authors' library: that of the weights, and that of an adapter's training."""
    adapter = adapter_settings(path)
    mapping = None if adapter is None else adapter.content.get("auto_mapping")
    trained = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    return (class_name(config), *([trained] if isinstance(trained, str) else []))
