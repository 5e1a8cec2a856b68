"""Models that weigh the entries of their vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers as hf

from tests.models.tiny import bodies
from tests.models.tiny.bodies import Body
from tests.models.tiny.classify import without_types
from tests.models.tiny.layout import write_json, write_modules
from tests.models.tiny.vocabularies import SIZE, word_piece

_QUERY = "Represent this for searching: "


def _bert(folder: Path) -> None:
    tokenizer = word_piece()
    model = hf.BertForMaskedLM(bodies.bert_config(len(tokenizer)))
    bodies.widen(model)
    with torch.no_grad():
        model.cls.predictions.bias -= 3  # few entries are above zero
    bodies.save(folder, model, tokenizer, tokenizer_class="BertTokenizer")


def _distilbert(folder: Path) -> None:
    tokenizer = word_piece()
    model = hf.DistilBertForMaskedLM(bodies.distilbert_config(len(tokenizer)))
    bodies.widen(model)
    with torch.no_grad():
        model.vocab_projector.bias -= 3
    bodies.save(folder, model, tokenizer)
    without_types(folder)


def _splade_bert(folder: Path) -> None:
    """As sentence-transformers saves it since 5.4."""
    _bert(folder)
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": SIZE}
    write_modules(
        folder,
        ("sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling", pooling),
        first="sentence_transformers.base.modules.transformer.Transformer",
    )
    logits = {"method": "forward", "method_output_name": "logits"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "fill-mask",
            "modality_config": {"text": logits},
            "module_output_name": "token_embeddings",
        },
    )
    _settings(folder)


def _splade_distilbert(activation: str, strategy: str) -> Body:
    def make(folder: Path) -> None:
        """As sentence-transformers 5.0 saved it."""
        _distilbert(folder)
        old = "sentence_transformers.sparse_encoder.models"
        pooling = {
            "pooling_strategy": strategy,
            "activation_function": activation,
            "word_embedding_dimension": None,
        }
        write_modules(folder, (f"{old}.SpladePooling", pooling), first=f"{old}.MLMTransformer")
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})
        _settings(folder)

    return make


def _settings(folder: Path) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SparseEncoder",
            "prompts": {"query": _QUERY, "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
    )


SPARSE: Mapping[str, Body] = {
    "splade-bert": _splade_bert,
    "splade-distilbert": _splade_distilbert("relu", "max"),
    "splade-sum": _splade_distilbert("log1p_relu", "sum"),
    "splade-plain": _bert,
}
"""Each kind, by name."""
