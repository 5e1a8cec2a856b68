"""Names that sentence-transformers has and this package lacks, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ONE_MODEL: Final = "it serves one model as it is"
_SETTINGS: Final = "device and dtype are settings, as in Pool(model, device=..., dtype=...)"
_LISTS: Final = "encode takes a list of any length, and uses all devices of the engine"

ABSENT_NAMES: Final[Mapping[str, str]] = {
    "decode": "detokenize(ids)",
    "default_prompt_name": "the argument prompt_name",
    "device": "card.device",
    "dtype": "card.dtype",
    "encode_multi_process": _LISTS,
    "evaluate": "give encode to the evaluator",
    "fit": _ONE_MODEL,
    "get_embedding_dimension": "card.width",
    "get_max_seq_length": "card.max_tokens",
    "get_sentence_embedding_dimension": "card.width",
    "max_length": "card.max_tokens, and the argument max_tokens of score and embed",
    "max_seq_length": "card.max_tokens, and the argument max_tokens of embed",
    "modalities": "card.lanes",
    "num_labels": "card.labels",
    "prompts": "card.prompts, and the arguments prompt and prompt_name",
    "save": _ONE_MODEL,
    "save_pretrained": _ONE_MODEL,
    "similarity": "a product of two arrays for vectors of length 1, or score(queries, documents)",
    "similarity_fn_name": "card.similarity",
    "similarity_pairwise": "score(queries, documents), of which each query has its document",
    "start_multi_process_pool": _LISTS,
    "stop_multi_process_pool": _LISTS,
    "to": _SETTINGS,
    "cuda": _SETTINGS,
    "half": _SETTINGS,
    "tokenizer": "tokenize(text)",
    "truncate_dim": "the argument truncate_dim of encode, or dimensions of embed",
}
"""Names of sentence-transformers, each with the thing that takes its place."""
