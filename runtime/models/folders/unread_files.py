"""Check that rejects a folder with files of a head that nothing reads.

Such files stand beside the weights of a transformer, which looks like an embedding model without them. Weights in other
formats, and variants of the same weights, are no heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.weight_files import weight_files
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_SAME_WEIGHTS: Final = re.compile(r"^(model|pytorch_model|flax_model|tf_model|open_clip|consolidated|adapter_model)")
"""Beginnings of names of the transformer's own weights, also in other layouts and data types."""

_OF_HEAD: Final = re.compile(r"(^|[_.-])(head|readout|decision|classifier|scorer|projection|projector)s?([_.-]|$)")
"""Words in the name of a head's settings or pickled weights."""

_ALONE: Final = (
    " --task embed (task='embed') uses the transformer alone, as an embedding model; a file that the model does not "
    "need must be moved out of the folder"
)
"""The way out."""

_PICKLED: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".joblib", ".skops")

_OWN_FILES: Final[Mapping[str, str]] = {
    "config_setfit.json": "the settings of a SetFit classifier, whose head (model_head.pkl) is of scikit-learn",
    "viterbi_calibration.json": (
        "the weights of a Viterbi search, by which this model's entities are found among its labels"
    ),
}
"""Files without which results are wrong, by their names, and what each is."""


def check_unread_files(folder: ModelFolder) -> None:
    """Reject weights and settings of a head that nothing reads.

    Raises:
        ConfigError: Names the file.
    """
    of_heads = set(_read_by_heads(folder))
    for place in dict.fromkeys((folder.path, folder.body)):
        read = {place / name for name in weight_files(place)} | of_heads
        for file in sorted(place.iterdir()):
            if (what := _OWN_FILES.get(file.name)) is not None:
                raise ConfigError(
                    f"{file.name}: is {what}, which is not supported: without it the model's results would be wrong."
                    f"{_ALONE}"
                )
            if file not in read and file.is_file() and _is_of_head(file):
                raise ConfigError(
                    f"{file.name}: belongs to a head that is not supported: without it the model's results would be "
                    f"wrong.{_ALONE}"
                )


def _read_by_heads(folder: ModelFolder) -> Iterator[Path]:
    """Yield files of linear layers that heads read beside the weights, as BGE-M3's."""
    for spec in (*folder.heads, *folder.image_heads):
        modules = getattr(spec, "modules", ()) or getattr(spec, "layers", ()) or (getattr(spec, "projection", None),)
        for module in modules:
            if isinstance(module, Projection):
                yield from module.files


def _is_of_head(file: Path) -> bool:
    name = file.name.lower()
    if file.suffix == ".safetensors":
        return not _SAME_WEIGHTS.match(name)
    if file.suffix in _PICKLED:
        return not _SAME_WEIGHTS.match(name) and _OF_HEAD.search(file.stem.lower()) is not None
    return name.endswith("_config.json") and _OF_HEAD.search(name.removesuffix("_config.json")) is not None
