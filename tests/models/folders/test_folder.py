"""Model folders that are read, and those that are rejected; no weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.specs.model import Dense, DenseSpec, LayerNorm, ModelFolder, Normalize
from staged_pool.stages.errors import ConfigError
from tests.models.tiny import write_json, write_modules

POOLING = ("Pooling", {"pooling_mode": "mean"})
DENSE = {"in_features": 4, "out_features": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a transformer in it, as far as reading goes."""
    write_json(tmp_path / "config.json", {"model_type": "bert", "architectures": ["BertModel"]})
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def rejection(folder: Path) -> str:
    with pytest.raises(ConfigError) as rejected:
        read_folder(folder)
    return str(rejected.value)


def dense(read: ModelFolder) -> DenseSpec:
    (spec,) = read.heads
    assert isinstance(spec, DenseSpec)
    return spec


def with_modules(folder: Path, *modules: tuple[str, dict[str, Any]]) -> ModelFolder:
    write_modules(folder, *modules)
    return read_folder(folder)


def test_a_folder_without_modules_is_read_as_a_plain_transformer(folder: Path) -> None:
    read = read_folder(folder)
    assert (dense(read).pooling, dense(read).normalize, dense(read).modules) == (("mean",), False, ())
    assert read.notes == ("no modules.json: mean pooling without normalisation is assumed",)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "lasttoken"),
        ({"architectures": ["Qwen3ForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": None}, "mean"),
    ],
)
def test_a_plain_causal_transformer_is_pooled_at_its_last_token(
    folder: Path, config: dict[str, Any], mode: str
) -> None:
    write_json(folder / "config.json", config)
    assert dense(read_folder(folder, task="embed")).pooling == (mode,)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["max", "mean"]}, ("max", "mean")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("lasttoken",)),
        ({"pooling_mode": "max", "pooling_mode_mean_tokens": True}, ("max",)),
        ({"word_embedding_dimension": 4}, ("mean",)),
    ],
)
def test_pooling_is_read_in_every_spelling(folder: Path, settings: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert dense(with_modules(folder, ("Pooling", settings))).pooling == modes


@pytest.mark.parametrize(
    "kind",
    [
        "sentence_transformers.models.Pooling",
        "sentence_transformers.models.pooling.Pooling",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "sentence_transformers.base.modules.Pooling",
    ],
)
def test_a_module_is_known_by_the_last_part_of_its_type(folder: Path, kind: str) -> None:
    assert dense(with_modules(folder, (kind, {"pooling_mode": "cls"}))).pooling == ("cls",)


def test_modules_after_the_pooling_keep_their_order(folder: Path) -> None:
    read = with_modules(
        folder,
        POOLING,
        ("Normalize", {}),
        ("pylate.models.Dense.Dense", DENSE | {"activation_function": "torch.nn.modules.linear.Identity"}),
        ("Dropout", {"dropout": 0.1}),
        ("LayerNorm", {"dimension": 2}),
        ("Normalize", {}),
        ("Dropout", {"dropout": 0.1}),
    )
    linear = Dense(
        folder=folder / "3_Dense", in_features=4, out_features=2, bias=True, activation="Identity", residual=False
    )
    assert dense(read).modules == (Normalize(), linear, LayerNorm(folder=folder / "5_LayerNorm", dimension=2))
    assert dense(read).normalize


def test_a_dense_without_an_activation_has_that_of_sentence_transformers(folder: Path) -> None:
    module = dense(with_modules(folder, POOLING, ("Dense", DENSE))).modules[0]
    assert isinstance(module, Dense)
    assert module.activation == "Tanh"


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_the_transformers_settings_are_read_under_old_names_too(folder: Path, name: str) -> None:
    write_json(folder / name, {"max_seq_length": 77, "do_lower_case": True})
    read = with_modules(folder, POOLING)
    assert (read.max_seq_length, read.lower_case) == (77, True)


def test_prompts_and_dimensions_are_read(folder: Path) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": "q: ", "document": None},
            "default_prompt_name": "query",
            "truncate_dim": 3,
            "similarity_fn_name": "dot",
        },
    )
    read = with_modules(folder, POOLING)
    assert read.prompts == {"query": "q: ", "document": ""}
    assert (read.default_prompt, dense(read).truncate_dim, read.similarity) == ("q: ", 3, "dot")


def test_a_folder_without_a_config_is_rejected(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert rejection(folder) == f"{folder}: no config.json, so this is not a complete model folder"


def test_a_folder_without_weights_is_rejected(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights, neither model.safetensors nor pytorch_model.bin" in rejection(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"]
)
@pytest.mark.parametrize(("text", "complaint"), [("{", "cannot be read as JSON"), ("7", "must hold a")])
def test_a_malformed_file_is_named(folder: Path, name: str, text: str, complaint: str) -> None:
    write_modules(folder, POOLING)
    (folder / name).write_text(text)
    assert rejection(folder).startswith(f"{name}: {complaint}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [], "modules.json: must begin with a Transformer, but begins with nothing"),
        ("modules.json", [7], "modules.json[0]: must be an object"),
        ("modules.json", [{"path": ""}], "modules.json[0]: type is missing"),
        ("modules.json", [{"type": 7}], "modules.json[0]: type=7 must be of type str"),
        (
            "modules.json",
            [{"type": "custom_st.Transformer"}],
            "modules.json[0]: module custom_st.Transformer is the folder's own code, which is never run",
        ),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Transformer", "path": "../elsewhere"}],
            "modules.json[0]: path='../elsewhere' leads out of the model folder",
        ),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.WordEmbeddings"}],
            "modules.json: must begin with a Transformer, but begins with WordEmbeddings",
        ),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Dense"}],
            "modules.json: the Transformer must be followed by a Pooling, but the chain is Transformer -> Dense",
        ),
        ("1_Pooling/config.json", {"pooling_mode": 7}, "pooling_mode=7 must be a name or a list of names"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling_mode='attention' is not known"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": 1}, "pooling_mode_mean_tokens=1 must be of type bool"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length=0 must be at least 1"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length='many' must be of type int"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "must be feature-extraction"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs is not supported"),
        ("config_sentence_transformers.json", {"model_type": "SomeEncoder"}, "model_type='SomeEncoder' is not"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "'query' is not among the prompts"),
        ("config_sentence_transformers.json", {"prompts": {"query": 7}}, "prompts['query'] must be a text"),
        ("config_sentence_transformers.json", {"truncate_dim": True}, "truncate_dim=True must be of type int"),
    ],
)
def test_a_setting_that_is_not_understood_is_named(folder: Path, name: str, content: object, message: str) -> None:
    write_modules(folder, POOLING)
    write_json(folder / name, content)
    assert message in rejection(folder)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (("WeightedLayerPooling", {}), "modules.json: module WeightedLayerPooling is not supported after the pooling"),
        (("Dense", {"in_features": 4}), "2_Dense/config.json: out_features is missing"),
        (
            ("Dense", DENSE | {"activation_function": "my.own.Activation"}),
            "2_Dense/config.json: activation_function='my.own.Activation' is not a module of torch.nn",
        ),
        (
            ("Dense", DENSE | {"module_input_name": "token_embeddings"}),
            "2_Dense/config.json: module_input_name='token_embeddings' is not supported, only sentence_embedding",
        ),
        (
            ("Normalize", {"module_output_name": "token_embeddings"}),
            "2_Normalize/config.json: module_output_name='token_embeddings' is not supported, only sentence_embedding",
        ),
    ],
)
def test_a_module_that_is_not_understood_is_named(
    folder: Path, module: tuple[str, dict[str, Any]], message: str
) -> None:
    write_modules(folder, POOLING, module)
    assert rejection(folder) == message


def test_a_prompt_may_be_left_out_of_the_pooling(folder: Path) -> None:
    assert not dense(with_modules(folder, ("Pooling", {"pooling_mode": "mean", "include_prompt": False}))).pools_prompt
    assert dense(with_modules(folder, POOLING)).pools_prompt


def test_whether_vectors_may_be_cut_is_read(folder: Path) -> None:
    assert not with_modules(folder, POOLING).matryoshka
    write_json(folder / "config.json", {"model_type": "bert", "matryoshka_dimensions": [64, 32]})
    read = with_modules(folder, POOLING)
    assert (read.matryoshka, read.dimensions) == (True, (32, 64))
    write_json(folder / "config.json", {"model_type": "bert", "is_matryoshka": True})
    read = with_modules(folder, POOLING)
    assert (read.matryoshka, read.dimensions) == (True, ())
