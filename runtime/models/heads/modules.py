"""What follows a pooling: the Dense, LayerNorm and Normalize modules of a folder, in its order, in float32."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from staged_pool.runtime.models.specs.model import Dense, HeadModule, LayerNorm, OwnLayer, Projection
from staged_pool.stages.errors import ConfigError

_DAMAGED: Final = (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError)
"""What a file of weights raises that is none, or holds others."""


def build_modules(
    modules: Sequence[HeadModule], width: int, checkpoint: nn.Module | None = None
) -> tuple[nn.Sequential, int]:
    """Load the modules that turn a pooled vector into the final one.

    Args:
        modules: As the folder lists them.
        width: Values of a pooled vector.
        checkpoint: The whole model, for layers of its own.

    Returns:
        The modules on the CPU, [n, width] -> [n, final width], both float32; and the final width.

    Raises:
        ConfigError: Weights are missing or do not fit, or a module expects vectors of another width.
    """
    layers: list[nn.Module] = []
    for module in modules:
        if isinstance(module, Dense):
            _expect(module.in_features, width, module.folder)
            layers.append(_loaded(_Dense(module), module.folder))
            width = module.out_features
        elif isinstance(module, LayerNorm):
            _expect(module.dimension, width, module.folder)
            layers.append(_loaded(_LayerNorm(module), module.folder))
        elif isinstance(module, Projection):
            linear = load_projection(module, width)
            layers.append(linear)
            width = linear.out_features
        elif isinstance(module, OwnLayer):
            linear = _own_layer(checkpoint, module.name, width)
            layers.append(linear)
            width = linear.out_features
        else:
            layers.append(_Normalize())
    return nn.Sequential(*layers).eval(), width


def load_projection(projection: Projection, width: int) -> nn.Linear:
    """A linear layer that lies in a file of its own or among other tensors, in float32. On the CPU.

    Raises:
        ConfigError: There is no such file, the tensors are not in it, or it expects vectors of another width.
    """
    file = next((file for file in projection.files if file.is_file()), None)
    if file is None:
        raise ConfigError(f"none of {', '.join(file.name for file in projection.files)} is there")
    names = [projection.weight, *([projection.bias] if projection.bias else [])]
    try:
        tensors = _tensors(file, names)
    except _DAMAGED as error:
        raise ConfigError(f"{file.name}: the weights cannot be used: {error}") from error
    if missing := [name for name in names if not isinstance(tensors.get(name), Tensor)]:
        raise ConfigError(f"{file.name}: there is no tensor {missing[0]}")
    weight = tensors[projection.weight]
    if weight.ndim != 2:
        raise ConfigError(f"{file.name}: {projection.weight} must have 2 dimensions, it has {weight.ndim}")
    _expect(weight.shape[1], width, file)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=projection.bias is not None)
    own = {"weight": weight} | ({"bias": tensors[projection.bias]} if projection.bias else {})
    try:
        linear.load_state_dict(own)
    except RuntimeError as error:
        raise ConfigError(f"{file.name}: the weights cannot be used: {error}") from error
    return linear.eval()


def _own_layer(checkpoint: nn.Module | None, name: str, width: int) -> nn.Linear:
    """A copy of a linear layer of the checkpoint, in float32. On the CPU."""
    try:
        layer = checkpoint.get_submodule(name) if checkpoint is not None else None
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear):
        raise ConfigError(f"the checkpoint has no linear layer {name}")
    if layer.in_features != width:
        raise ConfigError(f"{name}: takes vectors of {layer.in_features} values, but gets {width}")
    return copy.deepcopy(layer).float().cpu()


def _tensors(file: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Those of a file that have these names, or all. Of a pickled file, nothing but tensors is ever made.

    Raises:
        ValueError: It holds something else, or a tensor of whole numbers, which only a quantised layer has.
    """
    found = _read_tensors(file, names)
    for name, tensor in found.items():
        wanted = names is None or name in names
        if wanted and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise ValueError(f"{name} has numbers of type {tensor.dtype}: quantised weights are not supported")
    return found


def _read_tensors(file: Path, names: Sequence[str] | None) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys() if names is None or name in names}  # noqa: SIM118
    pickled = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(pickled, dict):
        raise ValueError(f"it holds a {type(pickled).__name__}, not tensors by name")
    return pickled


# The attributes below are named as the tensors are in the weights' files.


class _Dense(nn.Module):
    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.activation_function = _activation(dense)
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        if not dense.residual:
            self.residual: nn.Module | None = None
        elif dense.in_features == dense.out_features:
            self.residual = nn.Identity()
        else:
            self.residual = nn.Linear(dense.in_features, dense.out_features, bias=False)

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.activation_function(self.linear(pooled))
        return out if self.residual is None else out + self.residual(pooled)


def _activation(dense: Dense) -> nn.Module:
    """The function behind a Dense, which `config.json` names and no file sets up further.

    Raises:
        ConfigError: torch has no such module, it needs settings, or it changes the number of values.
    """
    where, kind = dense.folder.name, getattr(nn, dense.activation, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"{where}: activation {dense.activation} is not in torch.nn")
    try:
        activation: nn.Module = kind()
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            shape = activation.eval()(torch.zeros(1, dense.out_features)).shape
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError) as error:
        raise ConfigError(f"{where}: torch.nn.{dense.activation} is no activation without settings") from error
    if shape != (1, dense.out_features):
        raise ConfigError(f"{where}: activation {dense.activation} changes the number of values: not supported")
    return activation


class _LayerNorm(nn.Module):
    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(norm.dimension)

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.norm(pooled)
        return out


class _Normalize(nn.Module):
    def forward(self, pooled: Tensor) -> Tensor:
        return F.normalize(pooled, dim=-1)


def _expect(wanted: int, width: int, folder: Path) -> None:
    if wanted != width:
        raise ConfigError(f"{folder.name}: takes vectors of {wanted} values, but gets {width}")


def _loaded(module: nn.Module, folder: Path) -> nn.Module:
    """`module` with the weights of its folder, in float32 whatever they are stored in."""
    files = (folder / "model.safetensors", folder / "pytorch_model.bin")
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(f"{folder.name}: no model.safetensors and no pytorch_model.bin")
    try:
        module.load_state_dict(_tensors(file))
    except _DAMAGED as error:
        said = " ".join(str(error).split())  # in one line
        raise ConfigError(f"{folder.name}: the weights cannot be used: {said}") from error
    return module
