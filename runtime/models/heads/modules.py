"""Modules behind a pooling: Dense, LayerNorm, Normalize and projections, in float32."""

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

from staged_pool.runtime.models.folders.pickles import check_pickle
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.lfs_pointer import check_fetched
from staged_pool.runtime.models.specs.model import Dense, HeadModule, LayerNorm, OwnLayer
from staged_pool.stages.errors import ConfigError

_DAMAGED: Final = (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError)
"""Errors of a weights file that is damaged, or that holds other weights."""


def build_modules(
    modules: Sequence[HeadModule], width: int, checkpoint: nn.Module | None = None
) -> tuple[nn.Sequential, int]:
    """Load the modules between the pooled vector and the final one.

    Args:
        modules: Specs of the modules, in the order of the folder.
        width: Values of a pooled vector.
        checkpoint: The whole model, for modules that are layers of it.

    Returns:
        The modules, [n, width] -> [n, final width], both float32, on the CPU; and the final width.

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


def load_vector(folder: Path, name: str) -> Tensor:
    """Load a vector from the weights file of a folder, in float32 on the CPU.

    Raises:
        ConfigError: The file or the tensor is missing, or has another number of dimensions.
    """
    file = _weights_file(folder)
    try:
        found = _tensors(file, [name])
    except _DAMAGED as error:
        raise ConfigError(f"{folder.name}: the weights cannot be used: {error}") from error
    vector = found.get(name)
    if not isinstance(vector, Tensor) or vector.ndim != 1:
        raise ConfigError(f"{folder.name}: {file.name} has no vector {name}")
    return vector.float()


def load_projection(projection: Projection, width: int) -> nn.Linear:
    """Load a linear layer from a weights file, in float32 on the CPU.

    Raises:
        ConfigError: The file or its tensors are missing, or the layer takes vectors of another width.
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
    state = {"weight": weight} | ({"bias": tensors[projection.bias]} if projection.bias else {})
    try:
        linear.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"{file.name}: the weights cannot be used: {error}") from error
    return linear.eval()


def load_perceptron(projections: Sequence[Projection], width: int, out: int) -> nn.Sequential:
    """Load linear layers with ReLU between them, in float32 on the CPU.

    Args:
        projections: The layers, at least one.
        width: Values that the first one reads.
        out: Values that the last one gives.

    Raises:
        ConfigError: The file or the tensors of a layer are missing, or it has other widths.
    """
    layers: list[nn.Module] = []
    for projection in projections:
        linear = load_projection(projection, width)
        width = linear.out_features
        layers += [linear, nn.ReLU()]
    if width != out:
        raise ConfigError(f"{projections[-1].weight} gives {width} values, and not {out}, one for each label")
    return nn.Sequential(*layers[:-1])


def _own_layer(checkpoint: nn.Module | None, name: str, width: int) -> nn.Linear:
    """Copy a linear layer of the checkpoint, in float32 on the CPU.

    Raises:
        ConfigError: There is no such layer, or it takes vectors of another width.
    """
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
    """Read tensors of a weights file by name; all of them without names.

    Unpickling creates tensors only.

    Raises:
        ValueError: The file holds something else, or integer tensors, as quantised layers have.
    """
    found = _read_tensors(file, names)
    for name, tensor in found.items():
        wanted = names is None or name in names
        if wanted and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise ValueError(f"{name} has numbers of type {tensor.dtype}: quantised weights are not supported")
    return found


def _read_tensors(file: Path, names: Sequence[str] | None) -> dict[str, Any]:
    check_fetched(file, f"{file.parent.name}/{file.name}")
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys() if names is None or name in names}  # noqa: SIM118
    check_pickle(file, file.name)
    pickled = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(pickled, dict):
        raise ValueError(f"it holds a {type(pickled).__name__}, not tensors by name")
    return pickled


# The attributes of these modules have the names of the tensors in the weights files.


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
    """Return the activation of a Dense module, by its name in `config.json`.

    Raises:
        ConfigError: torch has no such module, it needs arguments, or it changes the number of values.
    """
    where, kind = dense.folder.name, getattr(nn, dense.activation, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"{where}: activation {dense.activation} is not in torch.nn")
    try:
        activation: nn.Module = kind()
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            shape = activation.eval()(torch.zeros(1, dense.out_features)).shape
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError) as error:
        raise ConfigError(f"{where}: torch.nn.{dense.activation} is no activation, or needs arguments") from error
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
    """Load the weights of a folder into `module`; float32, whatever their stored type."""
    file = _weights_file(folder)
    try:
        module.load_state_dict(_tensors(file))
    except _DAMAGED as error:
        reason = " ".join(str(error).split())  # in one line
        raise ConfigError(f"{folder.name}: the weights cannot be used: {reason}") from error
    return module


def _weights_file(folder: Path) -> Path:
    files = (folder / "model.safetensors", folder / "pytorch_model.bin")
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(f"{folder.name}: no model.safetensors and no pytorch_model.bin")
    return file
