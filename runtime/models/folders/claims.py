"""Check of the numbers in `config.json` before anything is built by them.

The classes of transformers make a module for each layer that a config names, and tables as large as it says. So a file
of a few bytes could ask for an endless load. What a config asks for must be among the weights that are there.

Numbers that only size tables are compared as a whole, by the model that they describe: see `checkpoint/claimed_size`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig

from staged_pool.runtime.models.folders.stored_tensors import StoredTensor
from staged_pool.runtime.models.specs.json_file import MOST, shown
from staged_pool.stages.errors import ConfigError

LEAST_LAYERS: Final = 128
"""Layers that a config may name with fewer among the weights: ALBERT repeats one. That many are built in a second."""

LEAST_EXPERTS: Final = 1024
"""Experts that a config may name with fewer among the weights."""

LEAST_COUNT: Final = 4096
"""Other parts that a config may name with fewer among the weights."""

_LAYERS: Final = re.compile(r"^(\w+_)?(layers?|depths?)$")
_NO_LAYERS: Final = re.compile(r"window|feature|per_|_every_|skip|index|interval|offset|spatial")
"""Settings that name a layer, or of which layers, and not how many there are."""
_EXPERTS: Final = re.compile(r"experts?$")
_COUNTS: Final = re.compile(r"^(n|num)_")
_LENGTHS: Final = re.compile(r"position|ctx|length|seq|token|point|frame|embed|vocab|hash")
"""Counts that make no parts: at most a table, whose size is checked."""
_POSITIONS: Final = ("max_position_embeddings", "n_positions")
_SINUSOIDAL: Final = ("sinusoidal_pos_embds", "sinusoidal_embeddings")
"""Settings of classes that compute a table of positions one by one."""
_BASES: Final = re.compile(r"theta|base")
"""Settings of rotary positions. They size nothing, and grow with the longest input."""
_MOST_BASE: Final = 10**18
_ALWAYS_READ: Final = frozenset({"num_labels"})
"""Settings of every class."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Counts of a folder's weights."""

    layers: int
    """Most parts with a number, side by side."""
    experts: int
    """The same, or most matrices in one tensor."""
    largest: int
    """Largest dimension of a tensor."""

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> _Stored:
        full = {name: tensor for name, tensor in tensors.items() if tensor.values}  # an empty one may claim anything
        siblings: dict[str, set[str]] = defaultdict(set)
        for name in full:
            for number in _NUMBER.finditer(f".{name}."):
                siblings[name[: max(0, number.start() - 1)]].add(number[0])
        layers = max(map(len, siblings.values()), default=0)
        matrices = max((tensor.shape[0] for tensor in full.values() if len(tensor.shape) > 2), default=0)
        largest = max((max(tensor.shape, default=0) for tensor in full.values()), default=0)
        return cls(layers, max(layers, matrices), largest)


def check_claims(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Reject a config that names more parts than the weights have, or a senseless number.

    Parts are layers, experts, labels and the like.

    Args:
        config: `config.json`, converted to a class of transformers.
        tensors: The tensors of the weights; empty if they cannot be known before they are loaded.

    Raises:
        ConfigError: Names the field, its number and that of the weights.
    """
    stored = _Stored.of(tensors)
    for part, where, kind in _parts(config, "config.json", _class_of(config)):
        is_counted = any(part.get(name) is True for name in _SINUSOIDAL)
        for field, value in part.items():
            is_read = _is_read(field, kind)
            counted = _counted(field, stored, is_read=is_read, is_counted=is_counted)
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if is_read and _is_beyond_use(field, number):
                    raise ConfigError(f"{where}: {field}={shown(number)} must be a number between {-MOST} and {MOST}")
                if counted is not None and number > max(counted.found, counted.least):
                    raise ConfigError(
                        f"{where}: {field}={shown(number)}, but the weights have {counted.found} {counted.what}"
                    )


def _is_beyond_use(field: str, number: int | float) -> bool:  # an int is no float here
    """Return True for a whole number that no kernel counts to, and for NaN."""
    if isinstance(number, float):
        return math.isnan(number)
    return abs(number) > (_MOST_BASE if _BASES.search(field) else MOST)


class _Counted(NamedTuple):
    """Parts that a field counts."""

    found: int
    """Their number among the weights."""
    least: int
    """Number that a field may name in any case."""
    what: str


def _counted(field: str, stored: _Stored, *, is_read: bool, is_counted: bool) -> _Counted | None:
    """Return what a field counts; None if its number makes no parts."""
    if _LAYERS.search(field) and not _NO_LAYERS.search(field):
        return _Counted(stored.layers, LEAST_LAYERS, "layers")
    if _EXPERTS.search(field):
        return _Counted(stored.experts, LEAST_EXPERTS, "experts")
    makes_parts = is_read and _COUNTS.search(field) and not _LENGTHS.search(field)
    if makes_parts or (is_counted and field in _POSITIONS):
        return _Counted(stored.largest, LEAST_COUNT, "values in a row at most")
    return None


def _parts(
    config: Mapping[str, Any], where: str, kind: type[PreTrainedConfig] | None
) -> Iterator[tuple[Mapping[str, Any], str, type[PreTrainedConfig] | None]]:
    """Yield a config and those inside it, with their names for errors and their classes."""
    yield config, where, kind
    for name, inner in config.items():
        if isinstance(inner, Mapping) and name.endswith("config"):
            of_class = (getattr(kind, "sub_configs", None) or {}).get(name)
            own = of_class if isinstance(of_class, type) and issubclass(of_class, PreTrainedConfig) else None
            yield from _parts(inner, f"{where}: {name}", _class_of(inner) or own)


def _class_of(config: Mapping[str, Any]) -> type[PreTrainedConfig] | None:
    """Return the class of a config by its `model_type`; None for code of the folder."""
    kind = config.get("model_type")
    found: type[PreTrainedConfig] | None = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401  # lazy
    return found


def _is_read(field: str, kind: type[PreTrainedConfig] | None) -> bool:
    """Return True if a class reads a field. What else a file holds is nobody's, such as facts about the training."""
    if kind is None or field in _ALWAYS_READ:
        return field in _ALWAYS_READ
    return field in inspect.signature(kind.__init__).parameters or field in kind.attribute_map
