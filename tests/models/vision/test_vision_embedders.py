"""Embedding models of texts and images whose folders do not state their way: their authors' code is written out here.

BiQwen2.5 is that of colpali-engine 0.3.18 (nomic-embed-multimodal), and jina-embeddings-v4-vllm that of its README.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Chat, Image, Output
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.models import image_oracle, qwen3_vl_oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, as_array
from tests.models.loading import rejection
from tests.models.oracle import apart
from tests.models.requests import embed, score
from tests.models.tiny import edit_json, write_json

EXACT = 1e-4
WIDE, TALL, SMALL = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3)
IMAGES = [WIDE, TALL, SMALL]
TEXTS = ["A function call with many arguments", "naïve café, Ωmega 🙂", "short"]
ENGINE_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
JINA_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
ENGINE_CARD = "# A model\n\n    model = BiQwen2_5.from_pretrained(\n"


def hidden(folder: Path, written: str, images: list[bytes]) -> tuple[list[int], torch.Tensor]:
    """Ids of a text with its images, and the last layer's vectors: [tokens, width]."""
    ids, given = qwen3_vl_oracle.tokens(folder, written, images, None)
    model = image_oracle.body_of(folder)
    model.rope_deltas = None
    with torch.inference_mode():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0]
    return ids[0].tolist(), found


def unit(vector: torch.Tensor) -> Array:
    return as_array(torch.nn.functional.normalize(vector.float(), dim=-1))


def last(folder: Path, written: str, *images: bytes) -> Array:
    """BiQwen2_5.forward: the last token of a sequence that is padded on the left."""
    return unit(hidden(folder, written, list(images))[1][-1])


def mean(folder: Path, written: str, *images: bytes) -> Array:
    """`get_embeddings` of jina's README: of an image, only the tokens from its first mark to its last."""
    ids, found = hidden(folder, written, list(images))
    if images:
        marks = ["<|vision_start|>", "<|vision_end|>"]
        start, end = image_oracle.tokenizer_of(folder).convert_tokens_to_ids(marks)
        found = found[ids.index(start) : ids.index(end) + 1]
    return unit(found.mean(dim=0))


def loaded(folder: Path, **settings: Any) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact", **settings))


def dense(model: Encoder, inputs: list[Any], **others: Any) -> Array:
    found = embed(model, inputs, Output.DENSE, **others).dense
    assert found is not None
    return found


def plain(tiny_folder: TinyFolder, folder: Path, kind: str = "qwen2.5-vl") -> Path:
    """A model that gives answers, as it is published: without files of sentence-transformers."""
    shutil.copytree(tiny_folder(kind), folder, ignore=shutil.ignore_patterns("*_Pooling", "*_Normalize"))
    for name in ("modules.json", "sentence_bert_config.json", "README.md"):
        (folder / name).unlink(missing_ok=True)
    return folder


def as_adapter(base: Path, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Make an adapter of a plain model, and the merged weights for the oracle."""
    folder.mkdir()
    for file in base.iterdir():
        if file.name not in ("config.json", "model.safetensors", "README.md"):
            shutil.copy(file, folder / file.name)
    torch.manual_seed(3)
    weights, parts = load_file(base / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in list(weights.items()):
        if name.endswith(("q_proj.weight", "down_proj.weight")) and "visual" not in name:
            first, second = torch.randn(4, tensor.shape[1]) * 0.2, torch.randn(tensor.shape[0], 4) * 0.2
            weights[name] = tensor + 2.0 * second @ first
            module = f"base_model.model.{name.removesuffix('.weight').replace('language_model.', '')}"
            parts |= {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}
    save_file(parts, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "FEATURE_EXTRACTION"}
    write_json(folder / "adapter_config.json", {**usual, "base_model_name_or_path": str(base), **settings})
    merged = Path(shutil.copytree(base, folder.parent / f"merged {folder.name}"))
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return folder, merged


def check_engine(model: Encoder, wanted: Path) -> None:
    pages = [last(wanted, ENGINE_PAGE, image) for image in IMAGES]
    queries = [last(wanted, text + "<|endoftext|>" * 10) for text in TEXTS]
    documents = [last(wanted, text) for text in TEXTS]
    shown = [Image(image) for image in IMAGES]
    for alone in (False, True):
        assert apart(dense(model, shown, alone=alone), pages) < EXACT
        assert apart(dense(model, TEXTS, alone=alone, prompt_name="query"), queries) < EXACT
        assert apart(dense(model, TEXTS, alone=alone), documents) < EXACT
    assert np.abs(np.array(queries) - np.array(documents)).max() > 100 * EXACT
    assert np.abs(score(model, TEXTS[0], shown).scores - np.array(pages) @ queries[0]).max() < EXACT


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_biqwen_gives_the_last_tokens_of_colpali_engine(attention: str, tiny_folder: TinyFolder) -> None:
    model = loaded(tiny_folder("biqwen2.5"), attention=attention)
    assert (model.card.attention, model.card.scoring) == (attention, "bi-encoder")
    assert "read as BiQwen2_5, as its class says" in model.card.notes[0]
    check_engine(model, tiny_folder("biqwen2.5"))


def test_an_adapter_of_nomic_is_told_by_its_card_its_class_or_its_name(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = plain(tiny_folder, tmp_path / "Qwen2.5-VL-3B-Instruct")
    adapter, merged = as_adapter(base, tmp_path / "adapter")
    (adapter / "README.md").write_text(ENGINE_CARD)
    model = loaded(adapter)
    assert "read as BiQwen2_5, as its model card says" in model.card.notes[0]
    check_engine(model, merged)
    (adapter / "README.md").unlink()
    assert "nothing in adapter says how it makes vectors" in rejection(adapter)
    named = adapter.rename(tmp_path / "nomic-embed-multimodal-3b")
    assert "as its name alone says" in loaded(named).card.notes[0]
    cached = tmp_path / "models--nomic-ai--nomic-embed-multimodal-3b" / "snapshots" / "0f1e"
    shutil.copytree(named, cached)
    assert "as its name alone says" in loaded(cached).card.notes[0]
    edit_json(named / "adapter_config.json", auto_mapping={"base_model_class": "BiQwen2_5", "parent_library": "x"})
    assert "as its class says" in loaded(named.rename(tmp_path / "any")).card.notes[0]


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_jina_v4_gives_means_of_texts_and_of_the_tokens_of_an_image(attention: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("jina-v4-vllm")
    model = loaded(folder, attention=attention)
    assert (model.card.attention, model.card.scoring) == (attention, "bi-encoder")
    assert "as its model card says" in model.card.notes[0]
    pages = [mean(folder, JINA_PAGE, image) for image in IMAGES]
    queries = [mean(folder, f"Query: {text}") for text in TEXTS]
    passages = [mean(folder, f"Passage: {text}") for text in TEXTS]
    shown = [Image(image) for image in IMAGES]
    for alone in (False, True):
        assert apart(dense(model, shown, alone=alone), pages) < EXACT
        assert apart(dense(model, TEXTS, alone=alone), queries) < EXACT
        for name, wanted in (("query", queries), ("document", passages), ("passage", passages)):
            assert apart(dense(model, TEXTS, alone=alone, prompt_name=name), wanted) < EXACT
    mixed = dense(model, [TEXTS[0], shown[0], TEXTS[1], shown[1]])
    assert apart(mixed, [queries[0], pages[0], queries[1], pages[1]]) < EXACT
    scores = score(model, TEXTS[0], [*TEXTS[1:], *shown]).scores
    assert np.abs(scores - np.array([*passages[1:], *pages]) @ queries[0]).max() < EXACT


@pytest.mark.parametrize(
    ("name", "passage"),
    [
        ("jina-embeddings-v4-vllm-retrieval", "Passage: "),
        ("jina-embeddings-v4-vllm-code", "Passage: "),
        ("jina-embeddings-v4-vllm-text-matching", "Query: "),
    ],
)
def test_jina_v4_is_told_by_its_name(name: str, passage: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    read = read_folder(plain(tiny_folder, tmp_path / name))
    assert "as its name alone says" in read.notes[0]
    assert (read.prompts["query"], read.prompts["passage"], read.default_prompt) == ("Query: ", passage, "Query: ")


@pytest.mark.parametrize("kind", ["biqwen2.5", "jina-v4-vllm"])
def test_conversations_of_texts_and_images_are_rejected_where_no_way_is_known(
    kind: str, tiny_folder: TinyFolder
) -> None:
    talk = Chat(({"role": "user", "content": (Image(WIDE), "What is it?")},))
    with pytest.raises(InvalidInput, match="reads one image or one text at a time"):
        dense(loaded(tiny_folder(kind)), [talk])


@pytest.mark.parametrize("kind", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "paddleocr-vl"])
@pytest.mark.parametrize("name", ["Instruct", "gme-embedding", "colnomic-embed-multimodal-3b"])
def test_a_model_of_which_nothing_is_known_is_rejected_unless_the_user_wants_vectors(
    kind: str, name: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = plain(tiny_folder, tmp_path / name, kind)
    (folder / "README.md").write_text("---\npipeline_tag: feature-extraction\n---\n# Embeds\n")
    with pytest.raises(ConfigError, match=r"nothing in .* says how it makes vectors.*--task embed"):
        read_folder(folder)
    assert read_folder(folder, task="embed").decided_by == "user"


def test_vectors_that_the_user_wants_are_those_of_conversations(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = plain(tiny_folder, tmp_path / "Instruct")
    model = loaded(folder, task="embed")
    talk = Chat(({"role": "user", "content": (Image(WIDE), "What is it?")},))
    wanted = image_oracle.conversation(folder, [("user", [WIDE, "What is it?"])])
    assert apart(dense(model, [talk]), [wanted]) < EXACT


def test_qwen3_vl_embedding_says_how_it_was_told(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    assert "read as Qwen3-VL-Embedding, as its name alone says" in read_folder(tiny_folder("qwen3-vl")).notes[0]
    asked = read_folder(plain(tiny_folder, tmp_path / "Instruct", "qwen3-vl"), task="embed")
    assert "read as Qwen3-VL-Embedding, as task='embed' alone says" in asked.notes[0]


def test_a_card_of_two_ways_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = plain(tiny_folder, tmp_path / "model")
    (folder / "README.md").write_text(f'{ENGINE_CARD}    LLM(model="jinaai/jina-embeddings-v4-vllm-code")\n')
    assert "is BiQwen2_5 and jina-embeddings-v4-vllm-retrieval or code" in rejection(folder)
