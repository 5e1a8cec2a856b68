"""NVIDIA's rerankers: Llama with attention in both directions, and a linear layer on the pooled vector.

The form of a pair is that of the README of https://huggingface.co/nvidia/llama-nemotron-rerank-1b-v2. Pooling, layer
and temperature are those of `LlamaBidirectionalForSequenceClassification` of https://github.com/NVIDIA-NeMo/Automodel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.bidirectional import own_pooling
from staged_pool.runtime.models.folders.classifier import read_labels
from staged_pool.runtime.models.folders.common_files import read_body_config, required
from staged_pool.runtime.models.folders.engine_retrievers import files_with
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import ModelFolder, PooledLabelsSpec
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.stages.errors import ConfigError

_WEIGHT: Final = "score.weight"
_PAIR: Final = "question:{query} \n \n passage:{document}"


def read_bidirectional_reranker(path: Path) -> ModelFolder:
    """Read such a folder.

    Raises:
        ConfigError: A file is missing or malformed, or a setting is not supported; the message names it.
    """
    file = required(path / "config.json", root=path)
    mode = own_pooling(file)
    assert mode is not None
    if file.content.get("temperature", 1) != 1:
        raise ConfigError(f"{file.name}: temperature={file.content['temperature']!r} is not supported, only 1")
    labels = read_labels(file.content)
    if len(labels) != 1:
        raise ConfigError(f"{file.name}: {len(labels)} labels are not supported for this class, only 1, the score")
    layer = Projection(files=files_with(path, _WEIGHT), weight=_WEIGHT, bias=None)
    return ModelFolder(
        path=path,
        body=path,
        config=read_body_config(path, root=path),
        heads=(PooledLabelsSpec(pooling=(mode,), modules=(layer,)),),
        scoring="cross-encoder",
        labels=labels,
        activation="identity",
        pair_template=PairTemplate(text=_PAIR, add_special_tokens=True),
        prompts={},
        notes=("read as llama-nemotron-rerank, as its class says: scores are logits, without a sigmoid",),
    )
