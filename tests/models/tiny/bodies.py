"""Transformers with wide random weights, saved with their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.tiny.vocabularies import byte_bpe, unigram, word_piece

WIDTH = 32
POSITIONS = 96

Body = Callable[[Path], None]


def save_body(
    folder: Path, model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast, **tokenizer_config: Any
) -> None:
    """Save a transformer with wide random weights, and its tokenizer."""
    widen(model)
    save(folder, model, tokenizer, **tokenizer_config)


def save(
    folder: Path, model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast, **tokenizer_config: Any
) -> None:
    """Save a transformer and its tokenizer, with settings that its class does not write."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tokenizer_config:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))


def widen(model: nn.Module) -> None:
    """Scale weights so that a wrong mask or position moves results far beyond rounding."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 1.5 * module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 1)
            elif isinstance(weight := getattr(module, "weight", None), nn.Parameter):
                weight.normal_(1, 0.2)  # the norms, whose class differs between architectures
            if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
                bias.normal_(0, 0.2)


def bert_config(vocabulary: int, **others: Any) -> hf.BertConfig:
    settings = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
    } | others
    return hf.BertConfig(vocab_size=vocabulary, **settings)


def distilbert_config(vocabulary: int, **others: Any) -> hf.DistilBertConfig:
    return hf.DistilBertConfig(
        vocab_size=vocabulary,
        dim=WIDTH,
        n_layers=3,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=POSITIONS,
        **others,
    )


def roberta_config(
    vocabulary: int, kind: type[hf.RobertaConfig] = hf.RobertaConfig, **others: Any
) -> hf.RobertaConfig | hf.XLMRobertaConfig:
    """Positions begin at 2 in this family."""
    return kind(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=1,
        **others,
    )


def modernbert_config(vocabulary: int, **others: Any) -> hf.ModernBertConfig:
    return hf.ModernBertConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=POSITIONS,
        local_attention=16,
        global_attn_every_n_layers=2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        cls_token_id=0,
        sep_token_id=2,
        **others,
    )


def qwen3_config(vocabulary: int, **others: Any) -> hf.Qwen3Config:
    settings = {"max_position_embeddings": POSITIONS, "pad_token_id": 1} | others
    return hf.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        **settings,
    )


def bert(folder: Path, **tokenizer_config: Any) -> None:
    tokenizer = word_piece()
    save_body(folder, hf.BertModel(bert_config(len(tokenizer))), tokenizer, **tokenizer_config)


def roberta(folder: Path) -> None:
    tokenizer = byte_bpe()
    save_body(folder, hf.RobertaModel(roberta_config(len(tokenizer))), tokenizer, model_max_length=POSITIONS)


def xlm_roberta(folder: Path, **others: Any) -> None:
    tokenizer = unigram()
    config = roberta_config(len(tokenizer), hf.XLMRobertaConfig, **others)
    save_body(folder, hf.XLMRobertaModel(config), tokenizer, model_max_length=POSITIONS)


def mpnet(folder: Path) -> None:
    tokenizer = byte_bpe()
    config = hf.MPNetConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        pad_token_id=1,
    )
    save_body(folder, hf.MPNetModel(config), tokenizer, model_max_length=POSITIONS)


def distilbert(folder: Path) -> None:
    tokenizer = word_piece()
    save_body(folder, hf.DistilBertModel(distilbert_config(len(tokenizer))), tokenizer)


def modernbert(folder: Path) -> None:
    tokenizer = byte_bpe(between="</s>")
    save_body(folder, hf.ModernBertModel(modernbert_config(len(tokenizer))), tokenizer)


def t5(folder: Path) -> None:
    tokenizer = byte_bpe(begin="", between="</s>")
    config = hf.T5Config(
        vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=1
    )
    save_body(folder, hf.T5EncoderModel(config), tokenizer)


def qwen3(folder: Path) -> None:
    tokenizer = byte_bpe(begin="", between="</s>")
    save_body(folder, hf.Qwen3Model(qwen3_config(len(tokenizer))), tokenizer)
