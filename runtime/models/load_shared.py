"""Loader of several models on the weights of one base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.load_deadline import LoadDeadline
from staged_pool.runtime.load_progress import LoadProgress
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.models.devices.launch import Replica, Replicas
from staged_pool.runtime.models.encoder import Encoder, compute
from staged_pool.runtime.models.find import FoundModel
from staged_pool.runtime.models.input_preparer import open_text_workers
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.model_card import log_card
from staged_pool.runtime.models.preparation import TextPreparation
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.towers.text import TextTower
from staged_pool.stages.errors import ConfigError, ModelFailed


def load_sharing(
    config: EngineConfig,
    base: ModelFolder,
    members: Sequence[FoundModel],
    memory: MemoryGovernor | None = None,
    progress: LoadProgress | None = None,
    *,
    deadline: LoadDeadline | None = None,
) -> list[Encoder]:
    """Load a base model once, and return a model for each member.

    Args:
        config: Settings of all members.
        base: The base model with the adapters of the members.
        members: Adapters of it, and at most the base model itself.
        memory: See `load_model`.
        progress: See `load_model`.
        deadline: See `load_model`.

    Raises:
        ConfigError: As for `load_model`; or an adapter does not fit the base model.
    """
    whole = load_model(config, FoundModel(name=members[0].name, folder=base), memory, progress, deadline=deadline)
    try:
        for found in members:
            if found.base is not None:
                _check(whole, found.name)
        first, *others = members
        models = [replace(whole, card=_card(whole.card, first, members))]
        models += [_beside(whole, _card(whole.card, found, members), config) for found in others]
    except BaseException:
        whole.close()
        raise
    for model in models:
        log_card(model.card)
    return models


def _check(model: Encoder, adapter: str) -> None:
    """Run a short forward with an adapter.

    Raises:
        ConfigError: It gives NaN or Inf, or fails.
    """
    for replica in model.replicas:
        tower = replica.towers["text"]
        assert isinstance(tower, TextTower)
        sample = [replace(sequence, adapter=adapter) for sequence in tower.sample_batch([2])]
        try:
            rows = compute(replica, sample)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the adapter {adapter} fails on an input of 2 tokens: {error}") from error
        if any(isinstance(row, ModelFailed) for row in rows):
            raise ConfigError(f"the weights of the adapter {adapter} cannot be used: they give NaN or Inf")


def _card(card: ModelCard, found: FoundModel, members: Sequence[FoundModel]) -> ModelCard:
    """Describe one member."""
    if found.base is None:
        return replace(card, name=found.name)
    folder = found.folder
    others = ", ".join(member.name for member in members if member is not found)
    return replace(
        card,
        name=found.name,
        similarity=folder.similarity or card.similarity,
        prompts=folder.prompts,
        default_prompt=folder.default_prompt,
        adapters=dict.fromkeys(("", *folder.prompts), found.name),
        notes=(*card.notes, f"an adapter on the weights of its base model, which it shares with {others}"),
    )


def _beside(model: Encoder, card: ModelCard, config: EngineConfig) -> Encoder:
    """Return a model on the same weights, with counters and processes of its own. Each may be released by itself."""
    replicas = [
        Replica(replica.device, replica.towers, replica.launchers, token_bytes=replica.token_bytes)
        for replica in model.replicas
    ]
    preparation = None if model.tokenizer is None else TextPreparation.of(model.tokenizer)
    return replace(model, card=card, replicas=Replicas(replicas), text_workers=open_text_workers(config, preparation))
