"""The right answers for a model folder, from sentence-transformers and transformers alone.

Everything is float32 on the CPU, and inputs go through a model one by one, so nothing depends on a batch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray

Array = NDArray[np.float32]
Pair = tuple[str, str]
Role = Literal["query", "document"]

T = TypeVar("T")


def scores(folder: Path, pairs: Sequence[Pair], *, activate: bool = True, prompt: str | None = None) -> Array:
    """Scores of a cross-encoder: [pairs] with one label, or else [pairs, labels]. Plain logits without `activate`."""
    model = _sentence_transformer("CrossEncoder", folder)
    function = None if activate else torch.nn.Identity()
    with _quiet():
        rows = [model.predict([pair], activation_fn=function, prompt=prompt, show_progress_bar=False) for pair in pairs]
    return np.concatenate(rows)


def labels(folder: Path, texts: Sequence[str], *, activate: bool = True) -> Array:
    """Scores [texts, labels] of transformers' text classification, which takes the function from the config."""
    classify = _pipeline("text-classification", folder)
    function = {} if activate else {"function_to_apply": "none"}
    limit = _max_tokens(classify.model.config, classify.tokenizer)
    rows = []
    with _quiet():
        for text in texts:
            found = classify(text, top_k=None, truncation=True, max_length=limit, **function)
            by_label = {each["label"]: each["score"] for each in found}
            rows.append([by_label[name] for _, name in sorted(classify.model.config.id2label.items())])
    return np.array(rows, np.float32)


def token_labels(folder: Path, text: str) -> Array:
    """Logits [tokens, labels], special tokens included."""
    tag = _pipeline("token-classification", folder)
    limit = _max_tokens(tag.model.config, tag.tokenizer)
    encoded = tag.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    with torch.inference_mode():
        logits: Array = tag.model(**encoded).logits[0].float().numpy()
    return logits


def entities(folder: Path, text: str, aggregation: str) -> list[dict[str, Any]]:
    """What transformers' token classification finds, with `none`, `simple`, `first`, `average` or `max`."""
    tag = _pipeline("token-classification", folder)
    tag.tokenizer.model_max_length = _max_tokens(tag.model.config, tag.tokenizer)
    with _quiet():
        found: list[dict[str, Any]] = tag(text, aggregation_strategy=aggregation)
    return found


# Loading


def loaded_cross_encoder(folder: Path) -> Any:
    """The model behind `scores`, for a test that looks inside."""
    return _sentence_transformer("CrossEncoder", folder)


def _cached(load: Callable[..., T]) -> Callable[..., T]:
    """Each model is loaded once in a process."""

    @functools.cache
    def loaded(*arguments: Any) -> T:
        torch.set_num_threads(1)
        with _quiet():
            return load(*arguments)

    return loaded


def _quiet() -> warnings.catch_warnings[Any]:
    """The libraries' own warnings are not about what is tested."""
    return warnings.catch_warnings(action="ignore")


@_cached
def _sentence_transformer(name: str, folder: Path) -> Any:
    import sentence_transformers

    kind = getattr(sentence_transformers, name)
    return kind(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})


@_cached
def _pipeline(task: str, folder: Path) -> Any:
    return hf.pipeline(task, model=str(folder), device="cpu", dtype=torch.float32)


def _max_tokens(config: Any, tokenizer: Any) -> int:
    """What the tokenizer says, unless the model has fewer positions: the rule of sentence-transformers."""
    return min(int(tokenizer.model_max_length), int(config.max_position_embeddings))
