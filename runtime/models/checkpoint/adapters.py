"""Merge of an adapter (LoRA of peft) into the weights of its base model.

A weight becomes W + s * B @ A, where s is alpha / r, or alpha / sqrt(r) with `use_rslora`. With DoRA (Liu et al., 2024,
https://arxiv.org/abs/2402.09353) its rows are then scaled to the saved magnitudes. Whole weights replace those of the
base model. A tensor that belongs to no weight of the model is an error.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from staged_pool.runtime.models.checkpoint.name_patterns import fits_end
from staged_pool.runtime.models.folders.adapters import ADAPTER, SETTINGS, WEIGHTS
from staged_pool.runtime.models.folders.pickles import check_pickle
from staged_pool.runtime.models.specs.json_file import JsonFile, shown
from staged_pool.stages.errors import ConfigError

_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?)$"
)
_WRAPPERS: Final = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)")
"""Names that peft adds around a module."""
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "custom_text_proj": "embedding_proj_layer",
    "linear": "embedding_proj_layer",
}
"""Name of a layer in the class of transformers, by its name in colpali-engine."""
POOLER: Final = re.compile(r"(^|\.)pooler\.")

Parts = dict[str, Tensor]


def merge_adapter(body: Path, model: PreTrainedModel, *, headless: bool) -> frozenset[str]:
    """Merge the adapter of a composed folder, if it has one, into a loaded model.

    Args:
        body: Folder of the transformer.
        model: The base model with its own weights.
        headless: True if the model has no head: an adapter of BERT's pooler, which nothing reads, is then ignored.

    Returns:
        Names of the weights that the adapter replaces as a whole.

    Raises:
        ConfigError: A tensor is damaged, fits no weight of the model, or has another shape.
    """
    folder = body / ADAPTER
    settings = JsonFile.read(folder / SETTINGS, root=folder)
    if settings is None:
        return frozenset()
    lora, whole = parts_by_module(read_tensors(folder))
    if headless:
        lora = {name: parts for name, parts in lora.items() if not POOLER.search(name)}
        whole = {name: tensor for name, tensor in whole.items() if not POOLER.search(name)}
    modules = dict(model.named_modules())
    given: set[str] = set()
    with torch.no_grad():
        for name, tensor in whole.items():
            given.add(_replace(name, tensor, modules))
        for name, parts in lora.items():
            _merge(modules[find_module(name, modules)], name, dict(parts), settings)
    return frozenset(given)


def read_tensors(folder: Path) -> Mapping[str, Tensor]:
    """Read the tensors of an adapter; a pickle as bare tensors, without code."""
    safe, pickled = (folder / name for name in WEIGHTS)
    try:
        if safe.is_file():
            return load_file(safe)
        check_pickle(pickled, pickled.name)
        found = torch.load(pickled, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ConfigError(f"{(safe if safe.is_file() else pickled).name}: the weights are damaged: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ConfigError(f"{pickled.name}: holds more than tensors by name")
    return found


def parts_by_module(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Parts], Mapping[str, Tensor]]:
    """Sort the tensors of an adapter: parts of a LoRA by module, and whole weights by name."""
    lora: dict[str, Parts] = defaultdict(dict)
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(_PREFIX)
        if (found := _PART.match(inner)) is not None:
            lora[found["module"]][found["part"].removesuffix(".weight")] = tensor.float()
        elif inner.endswith((".weight", ".bias")) and "lora_" not in inner:
            whole[_WRAPPERS.sub("", inner)] = tensor
        else:
            raise ConfigError(f"{WEIGHTS[0]}: {name} is not a part of a LoRA that is supported")
    return lora, whole


def _replace(name: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> str:
    """Replace a weight of the model, and return its full name."""
    inner, _, kind = name.rpartition(".")
    place = find_module(inner, modules)
    old = getattr(modules[place], kind, None)
    if not isinstance(old, nn.Parameter):
        raise ConfigError(f"{WEIGHTS[0]}: {name} fits no weight of the base model")
    check_shape(name, old.shape, tensor.shape)
    old.copy_(tensor)
    return f"{place}.{kind}" if place else kind


def _merge(module: nn.Module, name: str, parts: Parts, settings: JsonFile) -> None:
    """Merge the LoRA of one module."""
    weight = getattr(module, "weight", None)
    embedding = isinstance(module, nn.Embedding)
    first, second = (parts.pop(f"lora_{'embedding_' if embedding else ''}{part}", None) for part in "AB")
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or first is None or second is None:
        kind = type(module).__name__
        raise ConfigError(f"{WEIGHTS[0]}: {name} is a {kind}, whose LoRA is not supported or lacks a part")
    if first.dim() != 2 or second.dim() != 2 or first.shape[0] != second.shape[1] or not len(first):
        raise ConfigError(
            f"{WEIGHTS[0]}: {name}: lora_A and lora_B have shapes {[*first.shape]} and {[*second.shape]}, which do "
            "not fit each other"
        )
    scale = lora_scale(name, len(first), settings)
    turned = embedding or isinstance(module, Conv1D)  # [in, out], and not [out, in] as in nn.Linear
    old = weight.float().T if turned else weight.float()
    change = scale * (second @ first).to(old.device)
    check_shape(name, old.shape, change.shape)
    new = old + change
    if (magnitude := parts.pop("lora_magnitude_vector", None)) is not None and not embedding:
        check_shape(f"{name}.lora_magnitude_vector", new.shape[:1], magnitude.flatten().shape)
        new = new * (magnitude.flatten().to(new.device) / new.norm(dim=1))[:, None]
    elif magnitude is not None:
        raise ConfigError(f"{WEIGHTS[0]}: {name} is an embedding, whose DoRA is not supported")
    if (bias := parts.pop("lora_B.bias", None)) is not None:
        own = getattr(module, "bias", None)
        if not isinstance(own, nn.Parameter):
            raise ConfigError(f"{WEIGHTS[0]}: {name}.lora_B.bias: the base model has no bias there")
        check_shape(f"{name}.lora_B.bias", own.shape, bias.shape)
        own.copy_(own.float() + scale * bias.to(own.device))
    if parts:
        raise ConfigError(f"{WEIGHTS[0]}: {name}.{min(parts)} does not belong to a {type(module).__name__}")
    weight.copy_(new.T if turned else new)


def lora_scale(name: str, rank: int, settings: JsonFile) -> float:
    """Factor of B @ A. `alpha_pattern` names modules by a regular expression for the end of their names.

    Raises:
        ConfigError: A field is malformed, or an expression has too many ways to match the name.
    """
    alpha = settings.content.get("lora_alpha", 8)
    for pattern, value in settings.get("alpha_pattern", dict, {}).items():
        try:
            fits = fits_end(pattern, name)
        except ValueError as error:
            raise ConfigError(f"{SETTINGS}: alpha_pattern has {shown(pattern)}, {error}") from error
        if fits:
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{SETTINGS}: lora_alpha and the values of alpha_pattern must be numbers, not {alpha!r}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora", bool, False) else rank)


def find_module(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Find a module by the name that it had where the adapter was trained.

    That class may have had the transformer below another name, such as `model.`, or none. So the module is the one
    with the longest equal end of its name; of several, the one with the most equal parts before it.

    Raises:
        ConfigError: No module has such a name, or several have.
    """
    if name in modules:
        return name
    others = {part: other for part, other in _OTHER_NAMES.items() if part not in modules and other in modules}
    parts = [others.get(part, part) for part in name.split(".")]
    for start in range(max(1, len(parts) - 1)):
        end = ".".join(parts[start:])
        found = [each for each in modules if each == end or each.endswith(f".{end}")]
        shared = {each: len(set(each.split(".")) & set(parts[:start])) for each in found}
        best = [each for each in found if shared[each] == max(shared.values())]
        if len(best) == 1:
            return best[0]
        if best:
            raise ConfigError(f"{WEIGHTS[0]}: {name} may be {best[0]} or {best[1]} of the base model")
    raise ConfigError(f"{WEIGHTS[0]}: {name} fits no weight of the base model")


def check_shape(name: str, wanted: torch.Size, found: torch.Size) -> None:
    if wanted != found:
        raise ConfigError(
            f"{WEIGHTS[0]}: {name} has the shape {[*found]}, but the weights of the base model have {[*wanted]}"
        )
