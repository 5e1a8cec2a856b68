"""Folders of page retrievers that see an image in tiles: ColModernVBERT, ColIdefics3 and ColSmol.

They are classes of transformers or of colpali-engine. The latter also has classes with one vector of a page. The text
between tiles is that of Idefics3 (Laurençon et al., 2024, section 4.1, https://arxiv.org/abs/2408.12637).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.classifier import class_name
from staged_pool.runtime.models.folders.common_files import read_transformer_settings
from staged_pool.runtime.models.folders.engine_retrievers import TILED_RETRIEVERS, with_engine_config
from staged_pool.runtime.models.specs.conversation import ImageSpec, TileTexts
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    HeadSpec,
    ModelFolder,
    MultiVectorSpec,
    PoolingMode,
    RoleSettings,
)
from staged_pool.runtime.models.tokenizing.chat import without_special_tokens
from staged_pool.runtime.models.vision.image_layout import SHUFFLES
from staged_pool.stages.errors import ConfigError

_CLASS: Final = "ColModernVBertForRetrieval"

_POOLED: Final[Mapping[str, tuple[str, str, PoolingMode]]] = {
    "BiModernVBert": ("modernvbert", "ModernVBertModel", "mean"),
    "BiIdefics3": ("idefics3", "Idefics3Model", "lasttoken"),
}
"""Classes with one vector of a page: `model_type`, class of transformers, and pooling."""

_PAGES: Final[Mapping[str, str]] = {
    "idefics3": "<|im_start|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
    "modernvbert": "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
}
"""Prompt around a page by `model_type` of the body, from colpali-engine and transformers."""

_END: Final = "<end_of_utterance>"

_EXPANSION: Final = _END * 10
"""Text after a query (query augmentation), from the same processors."""

_SHUFFLED: Final[Mapping[str, int]] = {"idefics3": 2, "modernvbert": 4}
"""Patches that are merged along an edge, if the config does not say so."""


def is_tiled_retriever(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a retriever that sees an image in tiles."""
    name = class_name(config)
    kinds = {**TILED_RETRIEVERS, **{pooled: kind for pooled, (kind, _, _) in _POOLED.items()}}
    return name == _CLASS or (name in kinds and config.get("model_type") == kinds[name])


def read_tiled_folder(path: Path, config: Mapping[str, Any]) -> ModelFolder:
    """Read the folder of a retriever that sees an image in tiles.

    Args:
        path: The folder.
        config: Its `config.json`.

    Raises:
        ConfigError: A file is missing or malformed, or its settings contradict each other; the message names it.
    """
    processor = JsonFile.read(path / "processor_config.json", root=path) or JsonFile.empty()
    name = class_name(config)
    if name in _POOLED:
        _, kept, mode = _POOLED[name]
        described: Mapping[str, Any] = {**_without_code(config), "architectures": [kept]}
        body: Mapping[str, Any] = described
        head: HeadSpec = DenseSpec(pooling=(mode,), modules=(), normalize=True)
    else:
        described = config if name == _CLASS else with_engine_config(path, config)
        body = JsonFile("config.json", described).get("vlm_config", dict, {})
        head = MultiVectorSpec(own_layer="embedding_proj_layer")
    kind = body.get("model_type", "modernvbert")
    if kind not in SHUFFLES:
        raise ConfigError(f"config.json: vlm_config: model_type={kind!r} is not supported, only {', '.join(SHUFFLES)}")
    _check_tokens(JsonFile("config.json: vlm_config", body), kind, processor)
    texts = TileTexts()
    page = processor.get("visual_prompt_prefix", str, None) or _PAGES[kind]
    if page.count(texts.image) != 1:
        raise ConfigError(f"{processor.name}: visual_prompt_prefix must have one {texts.image}, the image's place")
    before, _, after = page.partition(texts.image)
    question, ends, _ = after.partition(_END)  # a client may send it without the marks around it
    return ModelFolder(
        path=path,
        body=path,
        config=described,
        architecture="vision-language model",
        heads=(head,),
        scoring="bi-encoder" if isinstance(head, DenseSpec) else "late-interaction",
        max_seq_length=read_transformer_settings(path, root=path).positive("max_seq_length"),
        prompts={"query": processor.get("query_prefix", str, None) or ""},
        roles={"query": RoleSettings(frame=("", _EXPANSION), keeps_special_tokens=True), "document": RoleSettings()},
        images=ImageSpec(
            frame=(before, after),
            takes_conversations=False,
            ignored_texts=(*((question.strip(),) if ends else ()), *ignored_texts(page, texts.image)),
            tiles=texts,
        ),
    )


def _without_code(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in config.items() if name != "auto_map"}


def ignored_texts(page: str, image: str) -> tuple[str, ...]:
    """Texts that a client may send beside a page: the visual prompt, or only its part after the image.

    vLLM's examples send the latter.

    Args:
        page: Prompt around a page.
        image: Token in it that stands for the image.
    """
    suffix = page.partition(image)[2] or page
    return tuple(dict.fromkeys(without_special_tokens(part) for part in (suffix, page)))


def _check_tokens(body: JsonFile, kind: str, processor: JsonFile) -> None:
    """Reject a processor whose tiles have more or fewer tokens than the model's vectors.

    Raises:
        ConfigError: They differ.
    """
    written = processor.positive("image_seq_len")
    vision = JsonFile(f"{body.name}: vision_config", body.get("vision_config", dict, {}))
    edge, patch = vision.positive("image_size"), vision.positive("patch_size")
    if written is None or edge is None or patch is None:
        return
    shuffle = body.positive(SHUFFLES[kind]) or _SHUFFLED[kind]
    if (computed := (edge // patch // shuffle) ** 2) != written:
        raise ConfigError(
            f"{processor.name}: image_seq_len={written}, but config.json makes {computed} vectors of a tile: of "
            f"{edge} x {edge} pixels, in patches of {patch}, of which {shuffle} x {shuffle} are merged"
        )
