"""Settings of sentence-transformers in `sentence_bert_config.json`, beside a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.runtime.models.specs.json_file import MOST, JsonFile
from staged_pool.stages.errors import ConfigError

_IGNORED: Final = frozenset(
    {"attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "padding_side", "torch_dtype",
     "trust_remote_code", "unpad_inputs", "use_cache", "use_fast", "use_memory_efficient_attention", "use_safetensors"}
)  # fmt: skip
"""Ignored arguments: they choose how a model runs, but do not change its results."""

_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("model_kwargs", "model_args"),
    "processor": ("processor_kwargs", "tokenizer_args"),
    "config": ("config_kwargs", "config_args"),
}
"""Fields with arguments for transformers' classes: newer and older name."""


def read_max_seq_length(file: JsonFile) -> int | None:
    """The longest input by the folder's settings, in tokens with special tokens. None: not set.

    Raises:
        ConfigError: The file has an unsupported setting that would change vectors; the message names it.
    """
    for field in ("query_length", "document_length", "query_expansion"):
        if file.content.get(field) is not None:
            raise ConfigError(f"{file.name}: {field} is not supported for a model with one vector per text")
    longest = file.positive("max_seq_length")
    for kind, names in _ARGUMENTS.items():
        for name in names:
            given = JsonFile(f"{file.name}: {name}", file.get(name, dict, {}))
            if kind == "processor":
                longest = _own_length(given) or longest
            known = _IGNORED | ({"model_max_length"} if kind == "processor" else set())
            if unknown := sorted(set(given.content) - known):
                raise ConfigError(f"{given.name}: {unknown[0]} is not supported")
    return longest


def _own_length(file: JsonFile) -> int | None:
    """Return `model_max_length`; None if it is not set, or so large that it stands for no limit, such as 10^30."""
    given = file.content.get("model_max_length")
    return None if isinstance(given, int | float) and given > MOST else file.positive("model_max_length")


def check_modalities(file: JsonFile, *, output: str) -> None:
    """Reject a Transformer that does more with a text than one forward pass.

    Args:
        file: `sentence_bert_config.json`.
        output: Name of the model's output that the next module takes.

    Raises:
        ConfigError: Texts go through a chat template or another method, or the next module takes another output,
            such as that of an inner layer.
    """
    for kind, asked in file.get("modality_config", dict, {}).items():
        where = f"{file.name}: modality_config: {kind}"
        if kind == "message":
            raise ConfigError(
                f"{where}: sentence-transformers would render every text by this folder's chat template, which is not "
                f"supported; remove this field if the model was trained on plain texts"
            )
        if kind == "text" and asked != {"method": "forward", "method_output_name": output}:
            raise ConfigError(f"{where} is not supported as {asked!r}, only {output} of forward")
    if (name := file.get("module_output_name", str, "token_embeddings")) != "token_embeddings":
        raise ConfigError(f"{file.name}: module_output_name={name!r} is not supported, only token_embeddings")
