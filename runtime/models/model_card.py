"""Cards of loaded models: everything about a model that requests and clients depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer
from staged_pool.runtime.models.devices.kernel_choices import tuning
from staged_pool.runtime.models.devices.launch import Replica
from staged_pool.runtime.models.encoder import compute
from staged_pool.runtime.models.specs.layers import StepLabelsSpec
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder, SpladeSpec
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import Output
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def build_card(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer | None,
    replicas: Sequence[Replica],
    config: EngineConfig,
    *,
    dtype: str,
) -> ModelCard:
    """Build the card of a model whose towers are loaded, without `load_s` and `memory_tokens`.

    Args:
        name: Served name.
        folder: Settings read from its folder.
        source: Its tokenizer. None: the model reads no texts.
        replicas: At least one.
        config: Settings of the engine.
        dtype: Name of the data type of the weights.
    """
    towers = replicas[0].towers
    text, first = towers.get("text"), next(iter(towers.values()))
    outputs = tuple(output for output in first.outputs if all(output in tower.outputs for tower in towers.values()))
    specs = (*folder.heads, *folder.image_heads)
    dense_spec = next((spec for spec in specs if isinstance(spec, DenseSpec)), None)
    return ModelCard(
        name=name,
        architecture=first.architecture,
        parameters=sum(tower.parameters for tower in dict.fromkeys(towers.values())),
        lanes=tuple(towers),
        outputs=outputs,
        scoring=folder.scoring,
        similarity=folder.similarity or "cosine",
        width=first.width,
        token_width=_token_width(replicas[0], first),
        matryoshka=folder.matryoshka if config.matryoshka is None else config.matryoshka,
        dimensions=folder.dimensions,
        max_active_dims=next((spec.max_active_dims for spec in specs if isinstance(spec, SpladeSpec)), None),
        labels=folder.labels,
        activation=folder.activation,
        labels_steps=any(isinstance(spec, StepLabelsSpec) for spec in specs),
        prompts=folder.prompts,
        default_prompt=folder.default_prompt,
        adapters=folder.adapter_of,
        max_tokens=first.max_tokens,
        vocabulary=text.tokenizer.settings.vocabulary if isinstance(text, TextTower) else 0,
        pooling="+".join(dense_spec.pooling) if dense_spec else "",
        normalize=bool(dense_spec and dense_spec.normalize),
        dtype=dtype,
        device=",".join(str(replica.device) for replica in replicas),
        splits_long_inputs=config.split_long_inputs and isinstance(text, TextTower) and Output.DENSE in outputs,
        attention="padded" if first.pads else "packed",
        torch_threads=tuning().threads,
        forward_workers=max(len(replicas), config.forward_workers or 1),
        launched_ahead=0 if replicas[0].device.type == "cpu" else 1,
        notes=(*folder.warnings, *folder.notes, *(source.notes if source is not None else ())),
        load_s=0.0,
    )


def log_card(card: ModelCard) -> None:
    """Log how the folder was understood, so that a user can check it."""
    log.info(
        "model.understood",
        model=card.name,
        architecture=card.architecture,
        lanes=[*card.lanes],
        outputs=[*map(str, card.outputs)],
        scoring=card.scoring,
        similarity=card.similarity,
        activation=card.activation,
        pooling=card.pooling,
        normalize=card.normalize,
        matryoshka=card.matryoshka,
        labels=len(card.labels),
        prompts=[*card.prompts],
        has_default_prompt=bool(card.default_prompt),
        max_tokens=card.max_tokens,
        dtype=card.dtype,
        attention=card.attention,
    )


def _token_width(replica: Replica, tower: Tower) -> int:
    """Return the number of values of one token's vector; 0 where the tower gives none."""
    if Output.MULTI_VECTOR not in tower.outputs:
        return 0
    (row,) = compute(replica, tower.sample_batch([2]))
    vectors = row.values[Output.MULTI_VECTOR] if isinstance(row, Row) else None
    return vectors.shape[-1] if isinstance(vectors, np.ndarray) else 0
