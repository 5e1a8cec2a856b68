"""Language models that score pairs, as their authors publish them: no files of sentence-transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors

from tests.models.tiny.bodies import WIDTH, qwen3_config, save_body
from tests.models.tiny.vocabularies import CORPUS, trained_bpe

POSITIONS = 2048
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, in short: it knows any role."""


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's words: line breaks in a row are one."""


def gemma(folder: Path, **tokenizer: Any) -> Path:
    """GemmaForCausalLM, whose tokenizer puts a token before every text."""
    tokenized = _tokenizer("<bos>", bos_token="<bos>", pad_token="<|endoftext|>", **tokenizer)
    config = hf.GemmaConfig(
        vocab_size=len(tokenized),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenized.pad_token_id,
        bos_token_id=tokenized.bos_token_id,
    )
    return _save(folder, hf.GemmaForCausalLM, config, tokenized)


def qwen2(folder: Path) -> Path:
    """Qwen2ForCausalLM with a chat template for any conversation."""
    tokenized = _tokenizer(pad_token="<|endoftext|>", chat_template=CHAT)
    config = hf.Qwen2Config(
        vocab_size=len(tokenized),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenized.pad_token_id,
    )
    return _save(folder, hf.Qwen2ForCausalLM, config, tokenized)


def qwen3(folder: Path) -> Path:
    """Qwen3ForCausalLM with a chat template for any conversation."""
    tokenized = _tokenizer(pad_token="<|endoftext|>", chat_template=CHAT)
    config = qwen3_config(len(tokenized), pad_token_id=tokenized.pad_token_id, max_position_embeddings=POSITIONS)
    return _save(folder, hf.Qwen3ForCausalLM, config, tokenized)


def llama(folder: Path) -> Path:
    """LlamaForCausalLM, of which nothing is known."""
    tokenized = _tokenizer("<bos>", bos_token="<bos>", pad_token="<|endoftext|>")
    config = hf.LlamaConfig(
        vocab_size=len(tokenized),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenized.pad_token_id,
    )
    return _save(folder, hf.LlamaForCausalLM, config, tokenized)


def card(folder: Path, text: str) -> Path:
    """Write the model card."""
    (folder / "README.md").write_text(text)
    return folder


def _save(folder: Path, kind: type[hf.PreTrainedModel], config: Any, tokenizer: hf.PreTrainedTokenizerFast) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(11)
    save_body(folder, kind(config), tokenizer)
    return folder


def _tokenizer(begin: str = "", **settings: Any) -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(_answering_bpe())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", **settings)


@functools.cache
def _answering_bpe() -> str:
    """A tokenizer in which each answer is one token, and two line breaks are one."""
    answers = [answer for answer in ("Yes", "yes", "no", "\n\n", "1", "0") for _ in range(4000)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<think>", "</think>"]
    return trained_bpe(special, [*CORPUS, *answers])
