"""Embedding models of which a text is all that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import save_file

from tests.models.tiny import bodies
from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, bert, bert_config, save_body
from tests.models.tiny.layout import MODERN, pooling_flags, write_json, write_modules
from tests.models.tiny.vocabularies import byte_bpe


def _bert_mean(folder: Path) -> None:
    bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})


def _bert_cls(folder: Path) -> None:
    """The newest names, and the transformer in a folder of its own."""
    bert(folder / "0_Transformer", model_max_length=48)
    write_modules(
        folder,
        (f"{MODERN}.pooling.Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "cls"}),
        (f"{MODERN}.dropout.Dropout", {"dropout": 0.5}),
        ("sentence_transformers.base.modules.normalize.Normalize", {}),
        body="0_Transformer",
    )
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", "prompts": {}})


def _bert_max_dense(folder: Path) -> None:
    """Two Dense: pickled and with an activation, and safe with a residual. Not normalised."""
    bert(folder)
    first = {
        "in_features": WIDTH,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    second = {
        "in_features": 24,
        "out_features": 20,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": True,
    }
    write_modules(folder, ("Pooling", pooling_flags("max_tokens")), ("Dense", first), ("Dense", second))
    torch.save({"linear.weight": torch.randn(24, WIDTH) / 6, "linear.bias": torch.randn(24)},
               folder / "2_Dense" / "pytorch_model.bin")  # fmt: skip
    save_file({"linear.weight": torch.randn(20, 24) / 6, "residual.weight": torch.randn(20, 24) / 6},
              folder / "3_Dense" / "model.safetensors")  # fmt: skip


def _bert_plain(folder: Path) -> None:
    bert(folder)


def _bert_mean_cls(folder: Path) -> None:
    bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens", pooling_mode_cls_token=True)), ("Normalize", {}))


def _bert_other_means(folder: Path) -> None:
    bert(folder)
    modes = ["weightedmean", "mean_sqrt_len_tokens", "lasttoken"]
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": modes}), ("Normalize", {}))


def _bert_layernorm(folder: Path) -> None:
    """A normalization in the middle, which counts, and lowercased text before a cased tokenizer."""
    tokenizer = byte_bpe()
    config = bert_config(len(tokenizer), pad_token_id=1)
    save_body(folder, hf.BertModel(config), tokenizer)
    write_modules(
        folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}), ("LayerNorm", {"dimension": WIDTH})
    )
    save_file({"norm.weight": torch.randn(WIDTH), "norm.bias": torch.randn(WIDTH)},
              folder / "3_LayerNorm" / "model.safetensors")  # fmt: skip
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})


def _roberta_mean(folder: Path) -> None:
    bodies.roberta(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_roberta_config.json", {"max_seq_length": POSITIONS})


def _xlmr_prompt(folder: Path) -> None:
    """A prompt before every text, and vectors that are cut."""
    bodies.xlm_roberta(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query", "truncate_dim": 20},
    )


def _mean_of(body: Body) -> Body:
    def make(folder: Path) -> None:
        body(folder)
        write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))

    return make


def _modernbert_cls(folder: Path) -> None:
    bodies.modernbert(folder)
    write_modules(folder, ("Pooling", pooling_flags("cls_token")), ("Normalize", {}))


def _t5_mean(folder: Path) -> None:
    bodies.t5(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})


def _qwen3_last(folder: Path) -> None:
    bodies.qwen3(folder)
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}), ("Normalize", {}))


EMBEDDING: Mapping[str, Body] = {
    "bert-mean": _bert_mean,
    "bert-cls": _bert_cls,
    "bert-max-dense": _bert_max_dense,
    "bert-plain": _bert_plain,
    "bert-mean-cls": _bert_mean_cls,
    "bert-other-means": _bert_other_means,
    "bert-layernorm": _bert_layernorm,
    "roberta-mean": _roberta_mean,
    "xlmr-prompt": _xlmr_prompt,
    "mpnet-mean": _mean_of(bodies.mpnet),
    "distilbert-mean": _mean_of(bodies.distilbert),
    "modernbert-cls": _modernbert_cls,
    "t5-mean": _t5_mean,
    "qwen3-last": _qwen3_last,
}
"""Each kind, by name."""
