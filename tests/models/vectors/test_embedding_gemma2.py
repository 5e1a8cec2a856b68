"""Texts of EmbeddingGemma 2, against transformers' class of the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch.nn import functional

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from tests.models.requests import embed as embed_all
from tests.models.tiny import byte_bpe, edit_json, pooling_flags, write_json, write_modules, write_prompts
from tests.models.tiny.bodies import widen
from tests.models.vectors.test_oracle import MIXED, embed
from tests.needed import needs

pytestmark = needs("transformers", "5.23", "EmbeddingGemma2Model")
CLOSE = 2e-5
RADIUS = 6
TEXTS = ["A man is eating food.", "x", *MIXED[:8], " ".join(MIXED)[:900]]
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("gemma") / "embeddinggemma-2"
    folder.mkdir()
    tokenizer = byte_bpe()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "sliding_window": RADIUS,
        "sliding_window_pattern": 2,
        "hidden_size_per_layer_input": 12,
        "embedding_dim": 40,
        "max_position_embeddings": 512,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}  # fmt: skip
    vision = hf.CONFIG_MAPPING["gemma4_vision"](**small)
    ids = {"image_token_id": 9, "video_token_id": 10, "audio_token_id": 11}
    model = hf.EmbeddingGemma2Model(
        hf.EmbeddingGemma2Config(text_config=text, vision_config=vision, audio_config=None, **ids)
    )
    widen(model)
    for layer in model.language_model.layers:
        layer.layer_scalar.fill_(0.8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pooling = {**pooling_flags("mean_tokens", include_prompt=True), "word_embedding_dimension": 40}
    write_modules(folder, ("Pooling", pooling), ("Normalize", {}))
    write_json(
        folder / "sentence_bert_config.json",
        {
            "max_seq_length": 512,
            "processing_kwargs": {"image": {"max_soft_tokens": 280}},
            "modality_config": {"text": _FORWARD, "image": _FORWARD, "image+text": _FORWARD},
            "module_output_name": "token_embeddings",
        },
    )
    write_prompts(folder, PROMPTS)
    write_json(folder / "processor_config.json", {"processor_class": "EmbeddingGemma2Processor"})
    write_json(folder / "preprocessor_config.json", {"image_processor_type": "Gemma4ImageProcessor"})
    return folder


def wanted(folder: Path, texts: list[str]) -> Any:
    model = hf.EmbeddingGemma2Model.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        given = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            vectors = model(input_ids=given["input_ids"]).last_hidden_state[0]
        rows.append(functional.normalize(vectors.mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_vectors_are_those_of_transformers(folder: Path, attention: Any) -> None:
    model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
    assert (model.card.attention, model.card.pooling, model.card.width) == (attention, "mean", 40)
    assert model.card.architecture == "EmbeddingGemma2TextModel"
    right = wanted(folder, TEXTS)
    assert np.abs(embed(model, TEXTS) - right).max() <= CLOSE
    alone = np.concatenate([embed(model, [text]) for text in TEXTS[:4]])
    assert np.abs(alone - right[:4]).max() <= CLOSE
    prompted = wanted(folder, [PROMPTS["query"] + text for text in TEXTS[:2]])
    assert np.abs(embed(model, TEXTS[:2], prompt_name="query") - prompted).max() <= CLOSE
    vectors = embed_all(model, TEXTS[:2], Output.MULTI_VECTOR).multi_vector
    assert vectors is not None
    assert vectors[0].shape[1] == 40


@pytest.mark.parametrize("change", [RADIUS - 1, RADIUS + 1])
def test_the_window_is_a_radius(folder: Path, tmp_path: Path, change: int) -> None:
    """One more or one less is another model: the comparison above sees it."""
    other = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["sliding_window"] = change
    write_json(other / "config.json", config)
    assert np.abs(wanted(other, TEXTS[-1:]) - wanted(folder, TEXTS[-1:])).max() > 1e-3


def test_the_log_says_that_only_texts_are_read(folder: Path) -> None:
    assert "texts only: images, sounds and videos of this model are not supported" in read_folder(folder).notes


def test_what_is_not_understood_is_rejected(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"language_model.gate.weight": torch.ones(2)}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"gate\.weight of the weights would not be read"):
        load_model(EngineConfig(model=str(other), dtype="float32"))
    edit_json(other / "config.json", architectures=["EmbeddingGemma2ForMine"])
    with pytest.raises(ConfigError, match="only EmbeddingGemma2Model"):
        load_model(EngineConfig(model=str(other), dtype="float32"))
