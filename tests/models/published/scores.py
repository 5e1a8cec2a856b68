"""Rerankers, classifiers, reward models and token classifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models import decoder_oracle
from tests.models.heads.test_rerankers import Oracle
from tests.models.published import Layout, served
from tests.models.published.comparisons import labels, scores, scores_by, token_labels
from tests.models.tiny import EVERY, bodies, rerankers
from tests.models.tiny.bodies import POSITIONS, Body, save_body
from tests.models.tiny.classify import SIGMOID, activation, labelled, one_label, without_types
from tests.models.tiny.hub import WEIGHTS, after
from tests.models.tiny.prompted import DEBERTA_POSITIONS
from tests.models.tiny.vocabularies import byte_bpe, unigram
from tests.models.vectors import test_bidirectional as bidirectional

NEMOTRON: Final = "LlamaBidirectionalForSequenceClassification"
TWO_LABELS: Final = labelled(("LABEL_0", "LABEL_1"))


def modernbert(kind: str, **config: Any) -> Body:
    """ModernBERT with a head, whose tokenizer gives no types."""

    def make(folder: Path) -> None:
        tokenizer = byte_bpe(between="</s>")
        model = getattr(hf, f"ModernBertFor{kind}")(bodies.modernbert_config(len(tokenizer), **config))
        save_body(folder, model, tokenizer)
        without_types(folder)

    return make


def deberta(kind: str, **config: Any) -> Body:
    """DeBERTa v2 with a head."""

    def make(folder: Path) -> None:
        tokenizer = unigram()
        settings = {
            "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "max_position_embeddings": POSITIONS, "pad_token_id": 1,
            "pooler_hidden_size": 32, **DEBERTA_POSITIONS,
        }  # fmt: skip
        model = getattr(hf, f"DebertaV2For{kind}")(hf.DebertaV2Config(**settings, **config))
        save_body(folder, model, tokenizer, model_max_length=POSITIONS)

    return make


def named(make: Any, name: str) -> Body:
    """A folder whose model card tells the family."""

    def body(folder: Path) -> None:
        folder.rmdir()
        make(folder)
        (folder / "README.md").write_text(f"# {name}\n")

    return body


def by(formula: str, folder: Path, query: str, document: str) -> float:
    """Return the logit of one of the authors' formulas."""
    return float(getattr(Oracle(folder), formula)(query, document))


def nemotron_rerank(folder: Path, pooling: str = "avg") -> None:
    """NVIDIA's class for pairs: no mask, the mean, and one linear layer; weights below `model.`."""
    folder.rmdir()
    bidirectional.nemotron(folder, architectures=[NEMOTRON], num_labels=1, pooling=pooling, id2label={"0": "LABEL_0"})
    tensors = load_file(folder / WEIGHTS)
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors | {"score.weight": torch.randn(1, 32)}, folder / WEIGHTS, {"format": "pt"})


def nemotron_formula(folder: Path, query: str, document: str) -> float:
    """The pooled vector of one text with both, times the layer."""
    tensors = load_file(folder / WEIGHTS)
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(f"question:{query} \n \n passage:{document}")["input_ids"]
    config = json.loads((folder / "config.json").read_text())
    rows = decoder_oracle.hidden({name.removeprefix("model."): one for name, one in tensors.items()}, config, ids)
    pooled = rows.mean(dim=0) if config["pooling"] == "avg" else rows[-1 if config["pooling"] == "last" else 0]
    return float(pooled @ tensors["score.weight"][0])


LAYOUTS: Final[Mapping[str, Layout]] = {
    "BAAI/bge-reranker-v2-m3": served(EVERY["ce-xlmr-reranker"], scores),
    "Alibaba-NLP/gte-reranker-modernbert-base": served(
        after(
            modernbert("SequenceClassification", classifier_pooling="mean", **one_label()),
            lambda folder: activation(folder, SIGMOID),
        ),
        scores,
    ),
    "ibm-granite/granite-embedding-reranker-english-r2": served(
        modernbert("SequenceClassification", classifier_pooling="cls", **one_label()), scores
    ),
    "mixedbread-ai/mxbai-rerank-large-v1": served(deberta("SequenceClassification", **one_label()), scores),
    "cross-encoder/ettin-reranker-32m-v1": served(EVERY["ce-modular"], scores),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": served(EVERY["ce-qwen3-seqcls"], scores),
    "Qwen/Qwen3-Reranker-0.6B": served(named(rerankers.qwen3, "Qwen3-Reranker-0.6B"), scores_by(partial(by, "qwen3"))),
    "Qwen/Qwen3-Reranker-0.6B, as a CrossEncoder": served(EVERY["ce-qwen3-lm"], scores),
    "BAAI/bge-reranker-v2-gemma": served(
        named(rerankers.gemma, "bge-reranker-v2-gemma"), scores_by(partial(by, "bge"))
    ),
    "mixedbread-ai/mxbai-rerank-base-v2": served(
        named(rerankers.qwen2, "mxbai-rerank-base-v2"), scores_by(partial(by, "mxbai"))
    ),
    "zeroentropy/zerank-1-small": served(named(rerankers.qwen3, "zerank-1-small"), scores_by(partial(by, "zerank_1"))),
    "zeroentropy/zerank-2": served(named(rerankers.qwen3, "zerank-2"), scores_by(partial(by, "zerank_2"))),
    "nvidia/llama-nemotron-rerank-1b-v2": served(nemotron_rerank, scores_by(nemotron_formula)),
    "nvidia/llama-nemotron-rerank, pooled by its last token": served(
        partial(nemotron_rerank, pooling="last"), scores_by(nemotron_formula)
    ),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": served(EVERY["reward-qwen3"], labels),
    "HuggingFaceFW/fineweb-edu-classifier": served(EVERY["seqcls-regression"], labels),
    "meta-llama/Llama-Prompt-Guard-2-86M": served(deberta("SequenceClassification", **TWO_LABELS), labels),
    "MoritzLaurer/ModernBERT-large-zeroshot-v2.0": served(
        modernbert("SequenceClassification", **labelled(("entailment", "not_entailment"))), labels
    ),
    "KRLabsOrg/lettucedect-base-modernbert-en-v1": served(
        modernbert("TokenClassification", **TWO_LABELS), token_labels
    ),
    "iiiorg/piiranha-v1-detect-personal-information": served(
        deberta("TokenClassification", **labelled(("I-ACCOUNTNUM", "I-CITY", "I-EMAIL", "O"))), token_labels
    ),
}
"""Served layouts, by the name of the repository, or of the form."""
