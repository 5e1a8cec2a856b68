"""Embedding models with prompts or shorter vectors, in several architectures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file

from tests.models.tiny import bodies
from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, bert, save_body
from tests.models.tiny.layout import MODERN, edit_json, pooling_flags, write_json, write_modules, write_prompts
from tests.models.tiny.vocabularies import CORPUS, chat_bpe, unigram, word_piece

SEARCH = "Represent this sentence for searching relevant passages: "
INSTRUCT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
LONG_POSITIONS = 160
"""Room for a long prompt."""


def _pooled(folder: Path, mode: str, **pooling: Any) -> None:
    """Pooling in the newest form, and a normalisation."""
    settings = {"embedding_dimension": WIDTH, "pooling_mode": mode, **pooling}
    write_modules(folder, (f"{MODERN}.pooling.Pooling", settings), ("Normalize", {}))


def _e5(folder: Path) -> None:
    bodies.xlm_roberta(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_prompts(folder, {"query": "query: ", "passage": "passage: "})


def _qwen3(side: str) -> Body:
    def make(folder: Path) -> None:
        """The token that ends a text, which is pooled, is the padding too."""
        tokenizer = chat_bpe(appended="<|endoftext|>", padding_side=side)
        config = bodies.qwen3_config(
            len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=LONG_POSITIONS
        )
        save_body(folder, hf.Qwen3Model(config), tokenizer)
        _pooled(folder, "lasttoken", include_prompt=True)
        write_prompts(folder, {"query": INSTRUCT, "document": ""})

    return make


def _gemma3(folder: Path) -> None:
    """Attention to both sides, in windows in some layers; two projections."""
    tokenizer = chat_bpe(appended="<|im_end|>", padding_side="left")
    config = hf.Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=LONG_POSITIONS,
        query_pre_attn_scalar=8,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_body(folder, hf.Gemma3TextModel(config), tokenizer)
    dense = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_modules(
        folder,
        ("Pooling", pooling_flags("mean_tokens", include_prompt=True)),
        ("Dense", {"in_features": WIDTH, "out_features": 64, **dense}),
        ("Dense", {"in_features": 64, "out_features": WIDTH, **dense}),
        ("Normalize", {}),
    )
    save_file({"linear.weight": torch.randn(64, WIDTH) / 6}, folder / "2_Dense" / "model.safetensors")
    save_file({"linear.weight": torch.randn(WIDTH, 64) / 8}, folder / "3_Dense" / "model.safetensors")
    write_prompts(
        folder,
        {
            "query": "task: search result | query: ",
            "document": "title: none | text: ",
            "Clustering": "task: clustering | query: ",
        },
    )


def _nomic(folder: Path) -> None:
    """The widths that vectors may be cut to are listed in the transformer's own config."""
    tokenizer = word_piece()
    config = hf.NomicBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    save_body(folder, hf.NomicBertModel(config), tokenizer, model_max_length=POSITIONS)
    edit_json(folder / "config.json", matryoshka_dimensions=[WIDTH, 24, 16, 8])
    write_modules(
        folder, ("Pooling", pooling_flags("mean_tokens")), ("LayerNorm", {"dimension": WIDTH}), ("Normalize", {})
    )
    save_file({"norm.weight": torch.randn(WIDTH), "norm.bias": torch.randn(WIDTH)},
              folder / "2_LayerNorm" / "model.safetensors")  # fmt: skip
    write_prompts(folder, {"query": "search_query: ", "document": "search_document: ", "clustering": "clustering: "})


def _instructor(folder: Path) -> None:
    """The prompt is seen but not pooled."""
    bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens", include_prompt=False)), ("Normalize", {}))
    write_prompts(folder, {"query": "Represent the question for retrieving documents: "})


def _instructor_bpe(folder: Path) -> None:
    """A prompt that is a token longer alone: a text takes its last blank."""
    bodies.roberta(folder)
    _pooled(folder, "mean", include_prompt=False)
    write_prompts(folder, {"query": "Represent the question for retrieving documents: "})


def _jina(folder: Path) -> None:
    """Vectors may be cut to any width."""
    bodies.xlm_roberta(folder)
    edit_json(folder / "config.json", is_matryoshka=True)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))


def _arctic(folder: Path) -> None:
    bert(folder)
    _pooled(folder, "cls")
    write_prompts(folder, {"query": SEARCH, "document": ""})


def _bge(folder: Path) -> None:
    bert(folder, model_max_length=POSITIONS, tokenizer_class="BertTokenizer")
    write_modules(folder, ("Pooling", pooling_flags("cls_token")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 80, "do_lower_case": True})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": SEARCH}})


def _gte(folder: Path) -> None:
    bodies.modernbert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")))


def _encoder(config: type[hf.PretrainedConfig], model: type[hf.PreTrainedModel], **others: Any) -> Body:
    def make(folder: Path) -> None:
        tokenizer = word_piece()
        settings = config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=POSITIONS,
            **others,
        )
        save_body(folder, model(settings), tokenizer, model_max_length=POSITIONS)
        write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))

    return make


def _bge_m3(folder: Path) -> None:
    """Two more heads, of whose being there nothing but their files tells."""
    bodies.xlm_roberta(folder)
    write_modules(folder, ("Pooling", pooling_flags("cls_token")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    colbert, weigh = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    bodies.widen(colbert)
    bodies.widen(weigh)
    with torch.no_grad():
        tokens = torch.tensor([unigram().encode(CORPUS[0])[:POSITIONS]])
        found = weigh(hf.XLMRobertaModel.from_pretrained(folder).eval()(tokens).last_hidden_state)
        weigh.bias.sub_(found.mean())  # half of the tokens weigh something
    torch.save(colbert.state_dict(), folder / "colbert_linear.pt")
    torch.save(weigh.state_dict(), folder / "sparse_linear.pt")


DEBERTA_POSITIONS = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
"""Settings of the relative positions of DeBERTa v3, for a tiny model."""

PROMPTED: Mapping[str, Body] = {
    "e5-xlmr": _e5,
    "qwen3-embed-left": _qwen3("left"),
    "qwen3-embed-right": _qwen3("right"),
    "gemma3-embed": _gemma3,
    "nomic-matryoshka": _nomic,
    "instructor-no-prompt": _instructor,
    "instructor-bpe-no-prompt": _instructor_bpe,
    "jina-matryoshka": _jina,
    "arctic-cls": _arctic,
    "bge-cls": _bge,
    "gte-modernbert-mean": _gte,
    "electra-mean": _encoder(hf.ElectraConfig, hf.ElectraModel, embedding_size=16),
    "deberta-mean": _encoder(hf.DebertaV2Config, hf.DebertaV2Model, **DEBERTA_POSITIONS),
    "albert-mean": _encoder(hf.AlbertConfig, hf.AlbertModel, embedding_size=16),
    "bge-m3": _bge_m3,
}
"""Each kind, by name."""
