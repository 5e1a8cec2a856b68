"""Loader of static token vectors, as a model whose only layer is the token embedding.

The table is `embedding.weight`, as StaticEmbedding of sentence-transformers saves it, or model2vec's `embeddings`. The
latter may have a row for several tokens (`mapping`), and a factor for each token (`weights`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer
from staged_pool.runtime.models.folders.pickles import check_pickle
from staged_pool.runtime.models.folders.static import STATIC_MODEL
from staged_pool.runtime.models.folders.weight_files import weight_files
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.tokenizer_file import TOKENIZER_FILE, read_tokenizer_file
from staged_pool.stages.errors import ConfigError

_TABLES: Final = ("embedding.weight", "embeddings")
_MAX_TOKENS: Final = 2**17
"""Longest text in tokens. sentence-transformers has no limit; a request must have one."""

_OTHERS: Final = ("mapping", "weights")


class StaticConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Sizes of the table, by the names of transformers."""

    model_type = STATIC_MODEL


class StaticEmbedding(PreTrainedModel):  # type: ignore[misc]
    """A token embedding, whose last row is zeros: the vector of a text without tokens."""

    config_class = StaticConfig
    base_model_prefix = ""

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Any attention fits: there is none."""
        return True

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> tuple[Tensor]:
        """Look tokens up: [batch, tokens] -> [batch, tokens, width]. Their places do not matter."""
        return (self.embedding(input_ids),)


def load_static(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> StaticEmbedding:
    """Load the table of a folder of static token vectors.

    Raises:
        ConfigError: The weights are damaged, are not a table of vectors, or do not fit each other.
    """
    table = _table(folder).to(dtype)
    rows, width = table.shape
    config = StaticConfig(vocab_size=rows + 1, hidden_size=width, tie_word_embeddings=False)
    model: StaticEmbedding = StaticEmbedding(config).to(dtype)
    with torch.no_grad():
        model.embedding.weight[:rows].copy_(table)
        model.embedding.weight[rows:].zero_()
    model.eval().requires_grad_(False).to(device)
    return model


def load_static_tokenizer(folder: ModelFolder) -> LoadedTokenizer:
    """Load `tokenizer.json`, without special tokens around a text.

    A text may be as long as the truncation in the file says, which sentence-transformers leaves on for these models.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    found = read_tokenizer_file(folder.body)
    if found is None:
        raise ConfigError(f"{folder.body}: no {TOKENIZER_FILE}")
    tokenizer: Tokenizer = found[0]
    file = JsonFile.read(folder.body / TOKENIZER_FILE, root=folder.body) or JsonFile.empty()
    truncation = file.get("truncation", dict, None) or {}
    tokenizer.post_processor = None
    return LoadedTokenizer(
        backend=tokenizer,
        max_tokens=JsonFile(f"{file.name}: truncation", truncation).positive("max_length") or _MAX_TOKENS,
        gives_types=False,
        chat_template=None,
        special_tokens={},
        truncation_side=found[1] or "right",
    )


def _table(folder: ModelFolder) -> Tensor:
    """The row of each token id: [tokens, width], as stored or in float32."""
    stored = stored_tensors(folder.body)
    name = next((name for name in _TABLES if name in stored), None)
    if name is None:
        raise ConfigError(f"{folder.body}: the weights have no {' or '.join(_TABLES)}")
    if unread := sorted(set(stored) - {name} - (set(_OTHERS) if name == "embeddings" else set())):
        raise ConfigError(f"{folder.body}: {unread[0]} of the weights is not known beside {name}")
    table = stored[name]
    if table.ndim != 2 or not table.is_floating_point():
        kind = str(table.dtype).removeprefix("torch.")
        raise ConfigError(f"{folder.body}: {name} must be a table of floating point numbers, not {table.ndim} x {kind}")
    if (mapping := stored.get("mapping")) is not None:
        if mapping.ndim != 1 or mapping.is_floating_point() or mapping.min() < 0 or mapping.max() >= len(table):
            raise ConfigError(f"{folder.body}: mapping must give each token one of the {len(table)} rows of {name}")
        table = table[mapping.long()]
    if (factors := stored.get("weights")) is not None:
        if factors.shape != table.shape[:1]:
            raise ConfigError(f"{folder.body}: weights has {factors.numel()} numbers for {len(table)} tokens")
        table = (table.to(torch.promote_types(table.dtype, torch.float32)) * factors[:, None]).float()
    return table


def stored_tensors(body: Path) -> Mapping[str, Tensor]:
    """Read all weights of a folder by name; pickled ones as bare tensors, without code.

    Raises:
        ConfigError: A file is damaged, or holds more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    for name in weight_files(body):
        file = body / name
        try:
            read = load_file if file.suffix == ".safetensors" else _bare_tensors
            tensors.update(read(file))
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise ConfigError(f"{file.name}: the weights are damaged: {error}") from error
    return tensors


def _bare_tensors(file: Path) -> dict[str, Tensor]:
    check_pickle(file, file.name)
    found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError("the file holds more than tensors by name")
    return found
