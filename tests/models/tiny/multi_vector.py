"""Models that give a vector for each token, in the three layouts that there are."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models.tiny import bodies
from tests.models.tiny.bodies import WIDTH, Body
from tests.models.tiny.layout import edit_json, write_json, write_modules
from tests.models.tiny.vocabularies import word_piece

DIMENSIONS = 24
QUERY_LENGTH = 24
DOCUMENT_LENGTH = 64


def _projection() -> torch.Tensor:
    return torch.randn(DIMENSIONS, WIDTH) / 6


def _pylate(model_type: str | None) -> Body:
    def make(folder: Path) -> None:
        """Its prefixes are added tokens with a blank in them, behind the first token."""
        tokenizer = word_piece()
        tokenizer.add_tokens(["[Q] ", "[D] "])
        model = hf.BertModel(bodies.bert_config(len(tokenizer)))
        bodies.save_body(folder, model, tokenizer, tokenizer_class="BertTokenizer")
        dense = {
            "in_features": WIDTH,
            "out_features": DIMENSIONS,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        write_modules(folder, ("pylate.models.Dense.Dense", dense))
        save_file({"linear.weight": _projection()}, folder / "1_Dense" / "model.safetensors")
        write_json(
            folder / "sentence_bert_config.json", {"max_seq_length": DOCUMENT_LENGTH - 1, "do_lower_case": False}
        )
        write_json(
            folder / "config_sentence_transformers.json",
            {
                **({"model_type": model_type} if model_type else {}),
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "MaxSim",
                "query_prefix": "[Q] ",
                "document_prefix": "[D] ",
                "query_length": QUERY_LENGTH,
                "document_length": DOCUMENT_LENGTH,
                "do_query_expansion": True,
                "attend_to_expansion_tokens": False,
                "skiplist_words": list(string.punctuation),
            },
        )

    return make


def _sentence_transformers(strategy: str, attend: bool) -> Body:
    def make(folder: Path) -> None:
        """As the MultiVectorEncoder of sentence-transformers 6 saves it."""
        tokenizer = word_piece()
        model = hf.BertModel(bodies.bert_config(len(tokenizer)))
        bodies.save_body(folder, model, tokenizer, tokenizer_class="BertTokenizer")
        base = "sentence_transformers.base.modules"
        dense = {
            "in_features": WIDTH,
            "out_features": DIMENSIONS,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "module_input_name": "token_embeddings",
            "module_output_name": "token_embeddings",
        }
        mask = {"skiplist_words": [".", ","], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
        tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        write_modules(
            folder,
            (f"{base}.dense.Dense", dense),
            ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", mask),
            (f"{base}.normalize.Normalize", tokens),
            first=f"{base}.transformer.Transformer",
        )
        save_file({"linear.weight": _projection()}, folder / "1_Dense" / "model.safetensors")
        write_json(
            folder / "sentence_bert_config.json",
            {
                "transformer_task": "feature-extraction",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings",
                "document_length": DOCUMENT_LENGTH,
                "query_expansion": {"strategy": strategy, "attend": attend, "token": None, "length": QUERY_LENGTH},
            },
        )
        write_json(
            folder / "config_sentence_transformers.json",
            {
                "model_type": "MultiVectorEncoder",
                "prompts": {"query": "query: ", "document": "passage: "},
                "default_prompt_name": None,
                "similarity_fn_name": "maxsim",
            },
        )

    return make


def _hf_colbert(folder: Path) -> None:
    """Stanford's: the projection lies among the transformer's weights, and the rest in `artifact.metadata`."""
    tokenizer = word_piece(unused=2)
    model = hf.BertModel(bodies.bert_config(len(tokenizer)))
    bodies.save_body(folder, model, tokenizer, tokenizer_class="BertTokenizer")
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": weight for name, weight in weights.items()}
    save_file(weights | {"linear.weight": _projection()}, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "dim": DIMENSIONS,
        "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))


MULTI_VECTOR: Mapping[str, Body] = {
    "colbert-pylate": _pylate("ColBERT"),
    "colbert-pylate-old": _pylate(None),
    "colbert-st": _sentence_transformers("fixed", attend=False),
    "colbert-st-min": _sentence_transformers("min", attend=True),
    "colbert-hf": _hf_colbert,
}
"""Each kind, by name."""
