"""Names of weights below that of a wrapper, as some training programs save them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.stored_tensors import read_shard
from staged_pool.runtime.models.folders.weight_files import weight_files

_WRAPPERS: Final = (
    "_orig_mod.",  # torch.compile
    "module.",  # DataParallel and DistributedDataParallel
    "base_model.model.",  # peft, after the merge
    "0.auto_model.",  # the first module of a SentenceTransformer
)
_AROUND_ADAPTERS: Final = (".base_layer.", ".lora_")
"""Parts of names that adapters have which are not merged."""


def unwrapped_names(body: Path) -> Mapping[str, str]:
    """Return transformers' `key_mapping` for weights that all lie below wrappers; empty for any others.

    The names behind the wrappers must fit the model like those of any weights, so nothing is guessed.

    Raises:
        ConfigError: A file of weights is damaged.
    """
    names = [name for file in weight_files(body) for name in read_shard(body / file, file)]
    wrapped = _common_wrappers(names)
    return {rf"^{re.escape(wrapped)}": ""} if wrapped else {}


def _common_wrappers(names: Collection[str]) -> str:
    """Return the wrappers, outermost first, below which all names lie."""
    found = ""
    if not names or any(part in name for part in _AROUND_ADAPTERS for name in names):
        return found
    while inner := [one for one in _WRAPPERS if all(name.startswith(found + one) for name in names)]:
        found += inner[0]
    return found
