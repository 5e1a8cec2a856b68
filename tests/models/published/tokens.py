"""Models of token vectors and of sparse vectors."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from safetensors.torch import save_file

from tests.models import oracle
from tests.models.heads.test_sparse_router import opensearch
from tests.models.published import Layout, served
from tests.models.published.comparisons import tokens, weights
from tests.models.tiny import EVERY, bodies, write_json, write_modules
from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, save_body
from tests.models.tiny.hub import WEIGHTS
from tests.models.tiny.vocabularies import byte_bpe

IDENTITY: Final = "torch.nn.modules.linear.Identity"


def pylate(body: str, *widths: tuple[int, bool], **settings: Any) -> Body:
    """PyLate's layout: Dense layers of these widths, with a residual where it is so."""

    def make(folder: Path) -> None:
        tokenizer = byte_bpe(between="</s>")
        tokenizer.add_tokens(["[Q] ", "[D] "])
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        if body == "modernbert":
            model: Any = hf.ModernBertModel(bodies.modernbert_config(len(tokenizer)))
        else:
            model = hf.Lfm2Model(lfm2_config(len(tokenizer)))
        save_body(folder, model, tokenizer, model_max_length=POSITIONS)
        layers, inputs = [], WIDTH
        for place, (width, residual) in enumerate(widths, start=1):
            dense = {"in_features": inputs, "out_features": width, "bias": False, "activation_function": IDENTITY}
            layers.append(("pylate.models.Dense.Dense", {**dense, "use_residual": residual}))
            (folder / f"{place}_Dense").mkdir()
            tensors = {"linear.weight": torch.randn(width, inputs) / 6}
            if residual and width != inputs:
                tensors["residual.weight"] = torch.randn(width, inputs) / 6
            save_file(tensors, folder / f"{place}_Dense" / WEIGHTS)
            inputs = width
        write_modules(folder, *layers)
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 63, "do_lower_case": False})
        common: dict[str, Any] = {
            "model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 64,
            "attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation),
        }  # fmt: skip
        write_json(folder / "config_sentence_transformers.json", common | settings)

    return make


def lfm2_config(vocabulary: int) -> hf.Lfm2Config:
    """Convolutions in most layers, attention in the others."""
    return hf.Lfm2Config(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, pad_token_id=1, conv_L_cache=3,
        layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
    )  # fmt: skip


def roberta_splade(folder: Path) -> None:
    """RobertaForMaskedLM with the modules of sentence-transformers 5."""
    tokenizer = byte_bpe()
    model = hf.RobertaForMaskedLM(bodies.roberta_config(len(tokenizer)))
    bodies.widen(model)
    with torch.no_grad():
        model.lm_head.bias -= 3
    bodies.save(folder, model, tokenizer, model_max_length=POSITIONS)
    old = "sentence_transformers.sparse_encoder.models"
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    write_modules(folder, (f"{old}.SpladePooling", pooling), first=f"{old}.MLMTransformer")
    settings = {"model_type": "SparseEncoder", "prompts": {}, "similarity_fn_name": "dot"}
    write_json(folder / "config_sentence_transformers.json", settings)


def router(folder: Path) -> None:
    torch.manual_seed(3)
    opensearch(folder)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "answerdotai/answerai-colbert-small-v1": served(EVERY["colbert-hf"], tokens(oracle.stanford_colbert)),
    "lightonai/GTE-ModernColBERT-v1": served(
        pylate("modernbert", (24, False), do_query_expansion=True), tokens(), needs="5.5"
    ),
    "lightonai/Reason-ModernColBERT": served(
        pylate("modernbert", (24, False), do_query_expansion=False, query_length=60), tokens(), needs="5.5"
    ),
    "mixedbread-ai/mxbai-edge-colbert-v0-17m": served(
        pylate("modernbert", (64, True), (24, False), do_query_expansion=True), tokens(), needs="5.5"
    ),
    "LiquidAI/LFM2-ColBERT-350M": served(pylate("lfm2", (24, False), do_query_expansion=True), tokens()),
    "a MultiVectorEncoder of sentence-transformers 6": served(EVERY["colbert-st"], tokens()),
    "naver/splade-v3": served(EVERY["splade-bert"], weights("query")),
    "ibm-granite/granite-embedding-30m-sparse": served(roberta_splade, weights()),
    "opensearch-project/opensearch-neural-sparse-encoding-v2-distill": served(
        EVERY["splade-distilbert"], weights("query")
    ),
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": served(router, weights("document")),
    "prithivida/Splade_PP_en_v2": served(EVERY["splade-plain"], weights(), task="sparse"),
}
"""Served layouts, by the name of the repository, or of the form."""
