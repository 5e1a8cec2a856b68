"""Adapters that stay beside the weights of their base model, so that several share them.

Each is read from a folder with peft's files, or from weights that hold the adapters of several tasks one after the
other (jina-embeddings-v3).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from staged_pool.runtime.models.checkpoint.adapters import (
    POOLER,
    Parts,
    check_shape,
    find_module,
    lora_scale,
    parts_by_module,
    read_tensors,
)
from staged_pool.runtime.models.checkpoint.flash_names import has_stacked_adapters, lora_factor, task_tensors
from staged_pool.runtime.models.folders.adapters import SETTINGS, WEIGHTS, check_adapter_settings
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.transformer.adapters import (
    Change,
    LowRank,
    LowRankEmbedding,
    Replacement,
    dora_factors,
)
from staged_pool.stages.errors import ConfigError

Changes: TypeAlias = dict[str, Change]
"""Change of each layer, by its name in the model."""


def read_adapter(folder: Path, model: PreTrainedModel) -> Changes:
    """Read an adapter from peft's files, for a transformer without a head.

    Args:
        folder: The folder of the files.
        model: The loaded transformer, whose dtype and device the tensors get.

    Raises:
        ConfigError: The files are missing or damaged, or a tensor fits no layer of the model.
    """
    settings = JsonFile.read(folder / SETTINGS, root=folder)
    if settings is None:
        raise ConfigError(f"{folder}: no {SETTINGS}, so this is not an adapter")
    check_adapter_settings(settings)
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ConfigError(f"{folder}: no {WEIGHTS[0]} beside {SETTINGS}")
    lora, whole = parts_by_module(read_tensors(folder))
    modules = dict(model.named_modules())
    replaced: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in whole.items():
        if not POOLER.search(name):
            inner, _, kind = name.rpartition(".")
            replaced[find_module(inner, modules)][kind] = tensor
    found: Changes = {}
    for name, parts in lora.items():
        if not POOLER.search(name):
            path = find_module(name, modules)
            found[path] = _low_rank(name, modules[path], dict(parts), settings, replaced.pop(path, {}))
    for path, tensors in replaced.items():
        found[path] = _replacement(path, modules[path], tensors)
    return {path: change.to(model.device, model.dtype) for path, change in found.items()}


def read_adapters(folder: ModelFolder, model: PreTrainedModel) -> dict[str, Changes]:
    """Read the adapters of a folder, by name.

    Raises:
        ConfigError: See `read_adapter` and `task_changes`.
    """
    if has_stacked_adapters(folder.config):
        tasks = [adapter.name for adapter in folder.adapters]
        return task_changes(task_tensors(folder.body, folder.config), tasks, lora_factor(folder.config), model)
    return {each.name: read_adapter(each.folder, model) for each in folder.adapters if each.folder is not None}


def task_changes(
    stacked: Mapping[str, Mapping[str, Tensor]], tasks: Sequence[str], scale: float, model: PreTrainedModel
) -> dict[str, Changes]:
    """Build the adapters of several tasks from their stacked matrices.

    Args:
        stacked: For each layer, `lora_A` and `lora_B` with one matrix for each task: [tasks, rank, in] and
            [tasks, out, rank] of a linear layer, or [tasks, rows, rank] and [tasks, rank, width] of an embedding.
        tasks: Names of the tasks.
        scale: Factor of the product.
        model: The loaded transformer.

    Raises:
        ConfigError: A layer is missing, or the shapes do not fit.
    """
    modules = dict(model.named_modules())
    found: dict[str, Changes] = {task: {} for task in tasks}
    for path, parts in stacked.items():
        layer, first, second = modules.get(path), parts.get("lora_A"), parts.get("lora_B")
        if not isinstance(layer, nn.Linear | nn.Embedding) or first is None or second is None:
            raise ConfigError(
                f"{path} of the weights is no layer of {type(model).__name__}, or lacks a part of its LoRA"
            )
        if first.dim() != 3 or second.dim() != 3 or not len(first) == len(second) == len(tasks):
            raise ConfigError(f"{path} of the weights must have one LoRA for each of the {len(tasks)} tasks")
        embedding = isinstance(layer, nn.Embedding)
        for task, a, b in zip(tasks, first, second, strict=True):
            shape = (len(a), b.shape[1]) if embedding else (len(b), a.shape[1])
            check_shape(f"the LoRA of {path}", layer.weight.shape, torch.Size(shape))
            change = LowRankEmbedding(a, scale * b.float().T) if embedding else LowRank(a, scale * b.float())
            found[task][path] = change.to(model.device, model.dtype)
    return found


def _low_rank(name: str, layer: nn.Module, parts: Parts, settings: JsonFile, replaced: Mapping[str, Tensor]) -> Change:
    """Build the LoRA of one layer.

    Args:
        name: Name of the layer in the adapter.
        layer: The layer.
        parts: Tensors of the LoRA.
        settings: `adapter_config.json`.
        replaced: Whole weights of the layer: at most its bias.
    """
    kind = type(layer)
    embedding = kind is nn.Embedding
    first, second = (parts.pop(f"lora_{'embedding_' if embedding else ''}{part}", None) for part in "AB")
    if kind not in (nn.Linear, nn.Embedding, Conv1D) or first is None or second is None or "weight" in replaced:
        raise ConfigError(
            f"{WEIGHTS[0]}: {name} is a {kind.__name__}, whose LoRA is not supported beside others, or lacks a part"
        )
    weight = layer.get_parameter("weight")
    turned = kind is not nn.Linear  # [in, out], and not [out, in]
    if first.dim() != 2 or second.dim() != 2 or first.shape[0] != second.shape[1] or not len(first):
        raise ConfigError(
            f"{WEIGHTS[0]}: {name}: lora_A and lora_B have shapes {[*first.shape]} and {[*second.shape]}, which do "
            "not fit each other"
        )
    check_shape(name, (weight.T if turned else weight).shape, torch.Size((len(second), first.shape[1])))
    scale = lora_scale(name, len(first), settings)
    second = second * scale
    magnitude, bias = parts.pop("lora_magnitude_vector", None), parts.pop("lora_B.bias", None)
    if parts or (embedding and (magnitude is not None or bias is not None)):
        left = min(parts) if parts else "lora_magnitude_vector" if magnitude is not None else "lora_B.bias"
        raise ConfigError(f"{WEIGHTS[0]}: {name}.{left} does not belong to a {kind.__name__}")
    if embedding:
        return LowRankEmbedding(first.T.contiguous(), second)
    factors = None
    if magnitude is not None:
        whole = (weight.T if turned else weight).detach().float().cpu()
        check_shape(f"{name}.lora_magnitude_vector", whole.shape[:1], magnitude.flatten().shape)
        factors = dora_factors(whole, second @ first, magnitude)
    added = None if bias is None else scale * bias
    if (new := replaced.get("bias")) is not None or added is not None:
        own = getattr(layer, "bias", None)
        if not isinstance(own, nn.Parameter):
            raise ConfigError(f"{WEIGHTS[0]}: {name}: the base model has no bias there")
        if new is not None:
            check_shape(f"{name}.bias", own.shape, new.shape)
            added = (added if added is not None else 0) + new.float() - own.detach().float().cpu()
        check_shape(f"{name}.lora_B.bias", own.shape, torch.as_tensor(added).shape)
    return LowRank(first, second, factors, added)


def _replacement(path: str, layer: nn.Module, tensors: Mapping[str, Tensor]) -> Change:
    """Copy a layer with other weights."""
    new = copy.deepcopy(layer)
    for kind, tensor in tensors.items():
        own = getattr(new, kind, None)
        if not isinstance(own, nn.Parameter):
            raise ConfigError(f"{WEIGHTS[0]}: {path}.{kind} fits no weight of the base model")
        check_shape(f"{path}.{kind}", own.shape, tensor.shape)
        with torch.no_grad():
            own.copy_(tensor)
    return Replacement(new)
