"""Tensors of a model folder's weights, as their files describe them: no value is read."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from staged_pool.runtime.models.folders.pickles import ZIP, check_pickle
from staged_pool.runtime.models.specs.lfs_pointer import POINTER, check_content
from staged_pool.stages.errors import ConfigError

_PICKLE: Final = b"\x80"

_MOST_CHARACTERS: Final = 1024
"""Most characters of a tensor's name. Layers are counted by the beginnings of names."""

_PICKLED_KINDS: Final = {
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Types that quantised weights of a pickle may have, by their names in safetensors."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weights file."""

    shape: tuple[int, ...]
    kind: str
    """Its type, as safetensors names it; empty for the usual types of a pickle."""

    @property
    def values(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def read_shard(path: Path, name: str) -> dict[str, StoredTensor]:
    """Read the tensors of one weights file, by name; empty for a pickle that holds more than tensors.

    Args:
        path: The file.
        name: Its name in error messages.

    Raises:
        ConfigError: The file is damaged, or no weights file, or the name of a tensor is no name.
    """
    tensors = _read(path, name)
    if (longest := max(map(len, tensors), default=0)) > _MOST_CHARACTERS:
        raise ConfigError(f"{name}: a tensor has a name of {longest} characters; at most {_MOST_CHARACTERS} are read")
    return tensors


def _read(path: Path, name: str) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        beginning = file.read(len(POINTER))
    if not beginning:
        raise ConfigError(f"{name}: the file is empty")
    check_content(beginning, name)
    if path.suffix != ".safetensors":
        return _read_pickle(path, name, beginning)
    try:
        with safe_open(path, "numpy") as stored:  # reads the header and checks it against the file's size
            slices = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118
            return {key: StoredTensor(tuple(s.get_shape()), str(s.get_dtype())) for key, s in slices.items()}
    except SafetensorError as error:
        raise ConfigError(f"{name}: the weights are damaged: {error}") from error


def _read_pickle(path: Path, name: str, beginning: bytes) -> dict[str, StoredTensor]:
    """Read a pickle, and reject a file that torch did not write: neither a ZIP archive nor a bare pickle."""
    if beginning.startswith(ZIP):
        check_pickle(path, name)
        found = _pickled(path)
        _check_repeats(found, path.stat().st_size, name)
        return {
            key: StoredTensor(tuple(value.shape), _PICKLED_KINDS.get(value.dtype, "")) for key, value in found.items()
        }
    if not beginning.startswith(_PICKLE):
        raise ConfigError(f"{name}: is not a weights file written by torch")
    return {}


def _pickled(path: Path) -> Mapping[str, torch.Tensor]:
    """Read the tensors of a pickle without their values; empty if it holds more than tensors."""
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, LookupError, ValueError, TypeError, EOFError, AttributeError):
        return {}  # loading the weights later reports the fault
    if not isinstance(content, dict):
        return {}
    return {str(key): value for key, value in content.items() if isinstance(value, torch.Tensor)}


def _check_repeats(tensors: Mapping[str, torch.Tensor], file_bytes: int, name: str) -> None:
    """Reject a tensor with more values than its file: a stride of 0 repeats a stored value, and loading writes it out.

    Raises:
        ConfigError: Names the tensor.
    """
    for key, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > file_bytes:
            raise ConfigError(
                f"{name}: {key} has {tensor.numel()} values, more than the file's {file_bytes} bytes hold"
            )
