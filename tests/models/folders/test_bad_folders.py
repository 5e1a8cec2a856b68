"""Folders that cannot be served: each is rejected in one line with the file and the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.folders.files import FIRST_VERSION
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.tiny import edit_json, write_json

Change = Callable[[Path], object]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "sentence_transformers.models"


@pytest.fixture
def folder(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A copy of `bert-mean` that a test may change."""
    return shutil.copytree(tiny_folder("bert-mean"), tmp_path / "model")


def rejection(folder: Path) -> str:
    with pytest.raises(ConfigError) as rejected:
        load_model(EngineConfig(model=str(folder), torch_threads=1))
    message = str(rejected.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "").replace(str(folder), "FOLDER")


def write(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def write_object(name: str, content: object) -> Change:
    return lambda folder: write_json(folder / name, content)


def edit(name: str, **fields: object) -> Change:
    return lambda folder: edit_json(folder / name, **fields)


def remove(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def cut(tokens: slice) -> Change:
    """Keep only some bytes of the weights."""
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[tokens])


def reshape(name: str, *shape: int) -> Change:
    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        assert name in weights
        save_file(weights | {name: torch.ones(shape)}, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def shard(folder: Path) -> None:
    """Bring the weights into two files and an index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    for place, some in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: weights[name] for name in some}, folder / f"part-{place}.safetensors", {"format": "pt"})
    index = {name: f"part-{1 + place % 2}.safetensors" for place, name in enumerate(names)}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": index})


def sharded(change: Change) -> Change:
    def change_shards(folder: Path) -> None:
        shard(folder)
        change(folder)

    return change_shards


def fewer_rows(folder: Path) -> None:
    """Take the end of the vocabulary away from the weights."""
    weights = load_file(folder / WEIGHTS)
    name = "embeddings.word_embeddings.weight"
    save_file(weights | {name: weights[name][:1000].clone()}, folder / WEIGHTS, metadata={"format": "pt"})
    edit_json(folder / "config.json", vocab_size=1000)


def only_python(folder: Path) -> None:
    """Ask for a tokenizer that has no fast form."""
    (folder / "tokenizer.json").rename(folder / "vocab.txt")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="CanineTokenizer")


def no_words(folder: Path) -> None:
    """Remove a folder's vocabulary, but for the special tokens."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")


def edit_tokenizer(**changes: Callable[[Any], object]) -> Change:
    """Change parts of `tokenizer.json` in place."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        for part, edited in changes.items():
            edited(content[part])
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


WRONG_IDS: dict[str, tuple[Change, str]] = {
    "an id beyond any vocabulary": (
        edit_tokenizer(model=lambda model: model["vocab"].update(zebra=10**9)),
        "tokenizer.json: model.vocab.zebra=1000000000 must be between -16777216 and 16777216",
    ),
    "an added token beyond any vocabulary": (
        edit_tokenizer(added_tokens=lambda tokens: tokens[0].update(id=10**9)),
        "tokenizer.json: added_tokens[0].id=1000000000 must be between -16777216 and 16777216",
    ),
    "a token around every text that has no weights": (
        edit_tokenizer(post_processor=lambda steps: steps["special_tokens"]["[CLS]"].update(ids=[4097])),
        "tokenizer.json: post_processor puts the token 4097 around texts, but the weights have ",
    ),
}


@pytest.mark.parametrize("change", WRONG_IDS)
def test_ids_beyond_the_vocabulary_are_named(folder: Path, change: str) -> None:
    edited, message = WRONG_IDS[change]
    edited(folder)
    assert rejection(folder).startswith(message)


def test_two_tokens_of_one_id_are_rejected(copy: TinyFolder) -> None:
    folder = copy("clip")
    edit_tokenizer(model=lambda model: model["vocab"].update(dict.fromkeys(list(model["vocab"])[500:502], 0)))(folder)
    assert rejection(folder).startswith("tokenizer.json: its tokens contradict each other: ")


WRONG_WEIGHTS: dict[str, tuple[Change, str]] = {
    "missing": (remove(WEIGHTS), "FOLDER: no weights, neither model.safetensors nor pytorch_model.bin"),
    "empty": (cut(slice(0)), "model.safetensors: the file is empty"),
    "cut in the length": (cut(slice(4)), "model.safetensors: the weights are damaged"),
    "cut in the header": (cut(slice(1000)), "model.safetensors: the weights are damaged"),
    "cut at the end": (cut(slice(-100)), "model.safetensors: the weights are damaged"),
    "a pointer": (
        write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "model.safetensors: is a Git LFS pointer, not the file: fetch it with `git lfs pull`",
    ),
    "of another width": (
        reshape("embeddings.word_embeddings.weight", 1500, 16),
        "FOLDER: the weights are not those of a BertModel: embeddings.word_embeddings.weight is missing or of another",
    ),
    "of a wider model": (edit("config.json", hidden_size=64), "FOLDER: the weights are not those of a BertModel"),
    "of fewer layers": (
        edit("config.json", num_hidden_layers=5),
        "FOLDER: the weights are not those of a BertModel: encoder.layer.3.",
    ),
    "of more layers": (
        edit("config.json", num_hidden_layers=2),
        "FOLDER: the weights have more layers than config.json, such as encoder.layer.2.",
    ),
    "an index without the file": (
        sharded(remove("part-2.safetensors")),
        "model.safetensors.index.json: names 'part-2.safetensors', which does not exist",
    ),
    "an index with an empty file": (sharded(write("part-2.safetensors", "")), "part-2.safetensors: the file is empty"),
    "an index that is no JSON": (sharded(write(INDEX, "{")), "model.safetensors.index.json: cannot be read as JSON"),
    "an index of nothing": (
        sharded(write_object(INDEX, {})),
        "model.safetensors.index.json: weight_map is missing or empty",
    ),
    "an index that leads out": (
        sharded(write_object(INDEX, {"weight_map": {"a": "../part-1.safetensors"}})),
        "model.safetensors.index.json: '../part-1.safetensors' leads out of the model folder",
    ),
    "an adapter beside": (
        write_object("adapter_config.json", {"peft_type": "LORA"}),
        "adapter_config.json: the folder has an adapter and weights of its own: remove the one that is not wanted",
    ),
}

WRONG_SETTINGS: dict[str, tuple[Change, str]] = {
    "no config": (remove("config.json"), "FOLDER: no config.json, so this is not a complete model folder"),
    "a config that is no JSON": (write("config.json", "model"), "config.json: cannot be read as JSON"),
    "a config that is no object": (write("config.json", "[]"), "config.json: must hold an object"),
    "an unknown architecture": (
        edit("config.json", model_type="unheardof"),
        "config.json: model_type='unheardof' is not known to transformers ",
    ),
    "no architecture": (edit("config.json", model_type=None), "config.json: model_type is missing"),
    "an architecture of its own": (
        edit("config.json", model_type="mine", auto_map={"AutoModel": "modeling.Mine"}),
        "config.json: auto_map={'AutoModel': 'modeling.Mine'} asks for the folder's own code",
    ),
    "no heads": (edit("config.json", num_attention_heads=0), "FOLDER: the transformer cannot be loaded: "),
    "a width that is a text": (edit("config.json", hidden_size="32"), "FOLDER: the transformer cannot be loaded: "),
    "an unknown function": (edit("config.json", hidden_act="nope"), "FOLDER: the transformer cannot be loaded: "),
    "no room for a text": (
        write_object("sentence_bert_config.json", {"max_seq_length": 2}),
        "the model takes 2 tokens, which its special tokens fill already",
    ),
    "a length of 0": (
        write_object("sentence_bert_config.json", {"max_seq_length": 0}),
        "sentence_bert_config.json: max_seq_length=0 must be at least 1",
    ),
    "an argument that changes the model": (
        write_object("sentence_bert_config.json", {"config_args": {"is_decoder": True}}),
        "sentence_bert_config.json: config_args: is_decoder is not supported",
    ),
    "lengths by role": (
        write_object("sentence_bert_config.json", {"query_length": 32}),
        "sentence_bert_config.json: query_length is not supported",
    ),
    "modules that lead out": (
        write_object("modules.json", [{"type": f"{MODULES}.Transformer", "path": "../other"}]),
        "modules.json[0]: path='../other' leads out of the model folder",
    ),
    "an unknown module": (
        write_object(
            "modules.json",
            [
                {"type": f"{MODULES}.Transformer", "path": ""},
                {"type": f"{MODULES}.Pooling", "path": "1_Pooling"},
                {"type": f"{MODULES}.Unheard", "path": ""},
            ],
        ),
        "modules.json: module Unheard is not supported after the pooling",
    ),
    "an unknown pooling": (
        write_object("1_Pooling/config.json", {"pooling_mode": "attention"}),
        "1_Pooling/config.json: pooling_mode='attention' is not known, only cls, max, mean",
    ),
    "an unknown pooling of old": (
        write_object("1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_attention": True}),
        "1_Pooling/config.json: pooling_mode_attention is not known, only pooling_mode_cls_token",
    ),
    "a pooling without its file": (
        remove("1_Pooling/config.json"),
        "FOLDER: no 1_Pooling/config.json, so this is not a complete model folder",
    ),
}

WRONG_TOKENIZERS: dict[str, tuple[Change, str]] = {
    "missing": (
        remove("tokenizer.json", "tokenizer_config.json"),
        "FOLDER: no tokenizer, neither tokenizer.json nor a vocabulary such as vocab.txt",
    ),
    "without words": (no_words, "the tokenizer has no words: its vocabulary is missing or empty"),
    "no JSON": (write("tokenizer.json", "{"), "tokenizer.json: cannot be read as JSON"),
    "no tokenizer": (write_object("tokenizer.json", {}), "FOLDER: the tokenizer cannot be loaded: "),
    "settings that are no JSON": (write("tokenizer_config.json", "{"), "tokenizer_config.json: cannot be read as JSON"),
    "settings that are no object": (write("tokenizer_config.json", "[]"), "tokenizer_config.json: must hold an object"),
    "without a fast form": (
        only_python,
        "FOLDER: CanineTokenizer is written in Python; a tokenizer.json is needed",
    ),
    "larger than the model": (fewer_rows, "the tokenizer has 1500 tokens, but the weights have only 1000"),
}


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_wrong_weights_are_rejected_in_one_line(wrong: str, folder: Path) -> None:
    change, message = WRONG_WEIGHTS[wrong]
    change(folder)
    assert rejection(folder).startswith(message)


@pytest.mark.parametrize("wrong", WRONG_SETTINGS)
def test_wrong_settings_are_rejected_in_one_line(wrong: str, folder: Path) -> None:
    change, message = WRONG_SETTINGS[wrong]
    change(folder)
    assert rejection(folder).startswith(message)


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # transformers 5.4 reads words that way
@pytest.mark.parametrize("wrong", WRONG_TOKENIZERS)
def test_a_wrong_tokenizer_is_rejected_in_one_line(wrong: str, folder: Path) -> None:
    change, message = WRONG_TOKENIZERS[wrong]
    change(folder)
    assert rejection(folder).startswith(message)


def test_weights_in_several_files_are_loaded(folder: Path) -> None:
    whole = load_model(EngineConfig(model=str(folder))).card
    shard(folder)
    assert not (folder / WEIGHTS).exists()
    assert load_model(EngineConfig(model=str(folder))).card.parameters == whole.parameters


def test_arguments_that_do_not_change_vectors_are_accepted(folder: Path) -> None:
    write_json(
        folder / "sentence_bert_config.json",
        {
            "max_seq_length": 64,
            "model_args": {"torch_dtype": "float16", "attn_implementation": "eager"},
            "tokenizer_args": {"model_max_length": 20, "padding_side": "left"},
            "config_kwargs": {},
            "query_length": None,
        },
    )
    assert load_model(EngineConfig(model=str(folder))).card.max_tokens == 20


def test_code_of_its_own_for_a_decoder_is_rejected_unless_the_folder_says_which_way_it_reads(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("qwen3-last"), tmp_path / "model")
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen3Model"})
    assert "auto_map={'AutoModel': 'modeling_qwen.Qwen3Model'} asks for the folder's own code" in rejection(folder)
    edit_json(folder / "config.json", is_causal=False)
    assert load_model(EngineConfig(model=str(folder))).card.architecture == "Qwen3Model"


@pytest.mark.parametrize("kind", FIRST_VERSION)
def test_a_model_that_only_a_newer_transformers_has_names_the_version(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.runtime.models.folders.files.CONFIG_MAPPING", {"bert": object})
    edit_json(folder / "config.json", model_type=kind)
    assert rejection(folder).endswith(f"to transformers {hf.__version__}; {FIRST_VERSION[kind]} and newer know it")


def test_what_was_understood_is_one_line_of_the_log(tiny_folder: TinyFolder, logged: list[dict[str, object]]) -> None:
    load_model(EngineConfig(model=str(tiny_folder("nomic-matryoshka")), dtype="float32"))
    assert [event for event in logged if event["event"] == "model.understood"] == [
        {
            "event": "model.understood",
            "log_level": "info",
            "model": "nomic-matryoshka",
            "architecture": "NomicBertModel",
            "lanes": ["text"],
            "outputs": ["dense", "multi_vector"],
            "scoring": "bi-encoder",
            "similarity": "cosine",
            "activation": "identity",
            "pooling": "mean",
            "normalize": True,
            "matryoshka": True,
            "labels": 0,
            "prompts": ["query", "document", "clustering"],
            "has_default_prompt": False,
            "max_tokens": 96,
            "dtype": "float32",
            "attention": "packed",
        }
    ]


@pytest.mark.parametrize(
    ("readme", "matryoshka"),
    [
        ("---\ntags:\n- sentence-transformers\n- loss:MatryoshkaLoss\n---\n# Model\n", True),
        ("---\r\ntags:\r\n  - 'loss:Matryoshka2dLoss'\r\n---\r\n", True),
        ('\ufeff---\nlanguage: en\n- "loss:MatryoshkaLoss"\n---\n', True),
        ("---\ntags:\n- loss:CosineSimilarityLoss\n---\n- loss:MatryoshkaLoss\n", False),
        ("# Model\n- loss:MatryoshkaLoss\n", False),
        ("---\n" + "- a\n" * 40_000 + "- loss:MatryoshkaLoss\n---\n", False),  # too far behind
        ("", False),
    ],
)
def test_the_tags_of_the_model_card_say_whether_vectors_may_be_cut(readme: str, matryoshka: bool, folder: Path) -> None:
    (folder / "README.md").write_bytes(readme.encode())
    assert load_model(EngineConfig(model=str(folder))).card.matryoshka is matryoshka
    assert json.loads((folder / "config.json").read_text()).get("is_matryoshka") is None
