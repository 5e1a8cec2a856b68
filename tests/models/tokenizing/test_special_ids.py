"""Special tokens with ids outside the vocabulary, and texts that end with a configured token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.checkpoint.special_ids import clear_unknown_ids
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import EmbedRequest, Output, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.requests import embed, score, sequences
from tests.models.tiny import edit_json
from tests.models.tiny.tokenizer_files import LLAMA, bytes_bpe, write_tokenizer
from tests.models.vectors.test_oracle import TEXTS

UNKNOWN = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), -1)


def changed(kind: str, tiny_folder: TinyFolder, folder: Path, **fields: Any) -> Path:
    shutil.copytree(tiny_folder(kind), folder)
    edit_json(folder / "config.json", **fields)
    return folder


@pytest.mark.parametrize("unknown", [-1, 151643])
def test_vectors_are_the_same_without_a_padding_token(
    unknown: int, tiny_folder: TinyFolder, load_tiny: LoadTiny, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    folder = changed("bert-mean", tiny_folder, tmp_path / "model", pad_token_id=unknown, eos_token_id=unknown)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    apart = np.abs(
        np.asarray(embed(model, TEXTS, Output.DENSE).dense)
        - np.asarray(embed(load_tiny("bert-mean"), TEXTS, Output.DENSE).dense)
    )
    assert apart.max() < 1e-5
    notes = [line["note"] for line in logged if line["event"] == "model.assumed"]
    said = f"config.json: pad_token_id={unknown}, eos_token_id={unknown}: not in the vocabulary, ignored"
    assert said in notes
    assert said in model.card.notes


def test_scores_are_the_same_without_special_ids(tiny_folder: TinyFolder, load_tiny: LoadTiny, tmp_path: Path) -> None:
    folder = changed("ce-qwen3-seqcls", tiny_folder, tmp_path / "model", **UNKNOWN)
    (folder / "generation_config.json").write_text(json.dumps(UNKNOWN))
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    wanted = score(load_tiny("ce-qwen3-seqcls"), "a query", TEXTS[:4]).scores
    assert np.abs(np.asarray(score(model, "a query", TEXTS[:4]).scores) - np.asarray(wanted)).max() < 1e-5


def test_a_model_that_counts_from_its_padding_token_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = changed("roberta-mean", tiny_folder, tmp_path / "model", pad_token_id=-1)
    with pytest.raises(
        ConfigError, match="pad_token_id=-1 is not in the vocabulary, and RobertaModel needs a padding token"
    ):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_of_several_ids_those_inside_the_vocabulary_stay() -> None:
    config = hf.Qwen3Config(vocab_size=10, eos_token_id=[3, -1, 10], bos_token_id=9, pad_token_id=10)
    assert clear_unknown_ids(config) == {"pad_token_id": 10, "eos_token_id": [3, -1, 10]}
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ([3], 9, None)
    config = hf.CLIPTextConfig(vocab_size=10, eos_token_id=49407, bos_token_id=49406)
    assert clear_unknown_ids(config, keeps_end=True) == {"bos_token_id": 49406}


def test_an_id_that_a_class_must_have_stays() -> None:
    config = hf.EuroBertConfig(vocab_size=10, pad_token_id=1, bos_token_id=0, eos_token_id=12, mask_token_id=11)
    assert clear_unknown_ids(config) == {"eos_token_id": 12}
    assert (config.eos_token_id, config.mask_token_id) == (None, 11)


def test_the_last_token_is_the_one_that_the_settings_ask_for(tmp_path: Path) -> None:
    """As e5-mistral: the file puts only the first token around a text, and the vector is that of the last one."""
    folder = tmp_path / "model"
    tokenizer = bytes_bpe(single="<s> $A")
    torch.manual_seed(3)
    config = hf.MistralConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = hf.MistralModel(config).eval()
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True, **LLAMA}
    write_tokenizer(folder, tokenizer, "mistral", **settings)
    model.save_pretrained(folder)
    edit_json(folder / "config.json", architectures=["MistralForCausalLM"])
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    ours = load_model(EngineConfig(model=str(folder), dtype="float32"))
    texts = ["in 2023 a text", "x"]
    end = tokenizer.token_to_id("</s>")
    request = EmbedRequest(inputs=tuple(map(TextInput, texts)))
    for text, sequence in zip(texts, sequences(ours, request), strict=True):
        assert sequence.ids == [*tokenizer.encode(text).ids, end]
    found = np.asarray(embed(ours, texts, Output.DENSE, normalize=False).dense)
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([[*tokenizer.encode(text).ids, end]]))[0][0, -1].numpy()
        assert np.abs(vector - wanted).max() < 1e-4
