"""Architectures that embedding models come in: each gives the vectors of its reference, or is run so that it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models import oracle
from tests.models.tiny import byte_bpe, pooling_flags, save_body, unigram, word_piece, write_modules
from tests.models.vectors.test_oracle import MIXED, TEXTS, embed

CLOSE = 2e-5
ROUGH = {"GPT2": 1e-4}
"""Architectures whose random weights amplify rounding: how much depends on the vocabulary, and so on this Python."""

POSITIONS = 96
USED = [TEXTS[0], *TEXTS[2:], *MIXED[:8]]

Settings = dict[str, Any]

_ENCODER: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
}
_ROBERTA = _ENCODER | {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1, "pad_token_id": 1}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1}
_GPT: Settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_T5: Settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 1}
_DEBERTA: Settings = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_WINDOW: Settings = {"sliding_window": 16}

ARCHITECTURES: dict[str, tuple[Settings, Callable[[], Any], str]] = {
    "Camembert": (_ROBERTA, unigram, "packed"),
    "Data2VecText": (_ROBERTA, byte_bpe, "packed"),
    "JinaEmbeddingsV3": (_ROBERTA, unigram, "packed"),
    "Ernie": (_ENCODER, word_piece, "packed"),
    "EuroBert": (_DECODER, byte_bpe, "packed"),
    "Deberta": (_ENCODER | _DEBERTA | {"type_vocab_size": 0}, word_piece, "padded"),
    "RoFormer": (_ENCODER | {"embedding_size": 32}, word_piece, "padded"),
    "Longformer": (_ROBERTA | {"attention_window": 8}, byte_bpe, "padded"),
    "MT5": (_T5, byte_bpe, "padded"),
    "Llama": (_DECODER, byte_bpe, "packed"),
    "Mistral": (_DECODER | _WINDOW, byte_bpe, "packed"),
    "Mixtral": (_DECODER | _WINDOW | {"num_local_experts": 2}, byte_bpe, "packed"),
    "Qwen2": (_DECODER | _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, byte_bpe, "packed"),
    "Gemma2": (_DECODER | _WINDOW | {"query_pre_attn_scalar": 8}, byte_bpe, "padded"),
    "GPT2": (_GPT, byte_bpe, "packed"),
    "GPTJ": (_GPT | {"rotary_dim": 4}, byte_bpe, "padded"),
    "Bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": POSITIONS}, byte_bpe, "padded"),
}

SEES_PADDING: dict[str, Settings] = {
    "MobileBert": _ENCODER | {"embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 1},
    "ConvBert": _ENCODER | {"embedding_size": 32, "head_ratio": 2},
}
"""Architectures with convolutions, whose vectors depend on padding."""


SAYS = {"MobileBert": "embeds each token with those beside it", "ConvBert": "has convolutions, which read the tokens"}
"""Reasons for that in the log."""

CONVOLUTIONS: dict[str, Settings] = {
    "ConvBert": SEES_PADDING["ConvBert"],
    "Lfm2": _DECODER
    | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
}


def build(name: str, settings: Settings, tokenizer: Any, folder: Path) -> Path:
    torch.manual_seed(7)
    config = getattr(hf, f"{name}Config")(vocab_size=len(tokenizer), **settings)
    model = getattr(hf, f"{name}EncoderModel" if name == "MT5" else f"{name}Model")(config)
    save_body(folder, model, tokenizer, model_max_length=POSITIONS)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    return folder


def distance(folder: Path) -> tuple[float, str]:
    """Return the largest distance from the oracle, batched or alone, and the batch layout."""
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    # Ids are those of the file: transformers' own class for Qwen2 splits words otherwise.
    transformer = oracle.loaded("SentenceTransformer", folder)[0]
    transformer.processor = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    transformer.model.set_experts_implementation("eager")  # which every torch can compute
    wanted = oracle.dense(folder, USED)
    alone = np.concatenate([embed(model, [text]) for text in USED])
    return float(max(np.abs(vectors - wanted).max() for vectors in (embed(model, USED), alone))), model.card.attention


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_gives_the_vectors_of_the_oracle(name: str, tmp_path: Path) -> None:
    settings, tokenizer, attention = ARCHITECTURES[name]
    far, layout = distance(build(name, settings, tokenizer(), tmp_path / "model"))
    assert far <= ROUGH.get(name, CLOSE)
    assert layout == attention


@pytest.mark.parametrize("name", SEES_PADDING)
def test_texts_are_run_without_padding_where_a_model_sees_it(
    name: str, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    far, layout = distance(build(name, SEES_PADDING[name], word_piece(), tmp_path / "model"))
    assert far <= CLOSE
    assert layout == "padded"
    reasons = [event["reason"] for event in logged if event["event"] == "model.peculiar"]
    assert len(reasons) == 1
    assert reasons[0].startswith(f"{name}Model {SAYS[name]}")


@pytest.mark.parametrize("scale", [1, 1e-3, 1e-4])
@pytest.mark.parametrize("name", ["ConvBert", "Lfm2"])
def test_weak_convolutions_depend_on_no_other_text(name: str, scale: float, tmp_path: Path) -> None:
    """Their layout follows from the layers: how far a probe is apart depends on the weights."""
    tokenizer = word_piece()
    folder = build(name, CONVOLUTIONS[name], tokenizer, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weak = {key: tensor * (scale if "conv" in key else 1) for key, tensor in tensors.items()}
    save_file(weak, folder / "model.safetensors", {"format": "pt"})
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    alone = np.concatenate([embed(model, [text]) for text in USED])
    assert np.abs(embed(model, USED) - alone).max() < 1e-6
    assert np.abs(alone - oracle.dense(folder, USED)).max() <= CLOSE
    with pytest.raises(ConfigError, match=r"attention='packed': \w+ has convolutions|does not let its attention"):
        load_model(EngineConfig(model=str(folder), dtype="float32", attention="packed"))


@pytest.mark.parametrize(
    ("name", "tokenizer", "settings"), [("Yoso", word_piece, _ENCODER), ("IBert", byte_bpe, _ROBERTA)]
)
def test_a_model_that_counts_positions_in_a_way_of_its_own_does_so(
    name: str, tokenizer: Callable[[], Any], settings: Settings, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    far, layout = distance(build(name, settings, tokenizer(), tmp_path / "model"))
    assert far <= CLOSE * 2  # I-BERT rounds
    assert layout == "padded"
    reasons = [event["reason"] for event in logged if event["event"] == "model.peculiar"]
    assert reasons[0] == f"{name}Model counts positions in a way of its own"


def test_a_model_that_gives_other_vectors_each_time_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("MobileBert", SEES_PADDING["MobileBert"], word_piece(), tmp_path / "model")
    forward = hf.MobileBertModel.forward

    @functools.wraps(forward)
    def noisy(self: Any, *arguments: Any, **settings: Any) -> Any:
        output = forward(self, *arguments, **settings)
        output.last_hidden_state = output.last_hidden_state + torch.randn_like(output.last_hidden_state)
        return output

    monkeypatch.setattr(hf.MobileBertModel, "forward", noisy)
    with pytest.raises(ConfigError, match="MobileBertModel gives other vectors each time"):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
