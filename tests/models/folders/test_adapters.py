"""Adapters (LoRA of peft) merged at load, against layers that compute the adapter's branch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from staged_pool.runtime.config import Attention, EngineConfig, Task
from staged_pool.runtime.models.checkpoint.weights import load_transformer
from staged_pool.runtime.models.find import check_model, find_model
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.tiny import bodies, edit_json, write_json
from tests.models.tiny.vocabularies import byte_bpe, word_piece
from tests.models.vectors.test_oracle import MIXED, TEXTS, embed

RANK: Final = 4
IDS: Final = torch.tensor([[2, 5, 6, 9, 3]])
SETTINGS: Final[Mapping[str, Any]] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": "gaussian", "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0",
    "qalora_group_size": 16, "r": RANK, "rank_pattern": {}, "revision": None, "target_modules": ["query", "value"],
    "target_parameters": None, "task_type": "FEATURE_EXTRACTION", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""`adapter_config.json` as peft 0.18 writes it."""


def lora(model: nn.Module, *targets: str, rank: int = RANK) -> dict[str, Tensor]:
    """Random parts of a LoRA for the layers whose names end so, by peft's names."""
    parts: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not name.endswith(targets):
            continue
        rows, columns = module.get_parameter("weight").shape
        if isinstance(module, nn.Embedding):
            parts[f"{name}.lora_embedding_A"] = torch.randn(rank, rows) * 0.3
            parts[f"{name}.lora_embedding_B"] = torch.randn(columns, rank) * 0.3
            continue
        out, inner = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
        parts[f"{name}.lora_A.weight"] = torch.randn(rank, inner) * 0.3
        parts[f"{name}.lora_B.weight"] = torch.randn(out, rank) * 0.3
    assert parts
    return parts


def with_magnitudes(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    sizes = {name.replace("lora_B.weight", ""): len(each) for name, each in parts.items() if "lora_B" in name}
    return parts | {f"{name}lora_magnitude_vector": torch.rand(size) + 0.5 for name, size in sizes.items()}


def with_biases(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return parts | {
        name.replace("weight", "bias"): torch.randn(len(each)) for name, each in parts.items() if "lora_B" in name
    }


def write(folder: Path, base: Path | str, parts: Mapping[str, Tensor], **settings: Any) -> Path:
    """Write an adapter's folder."""
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": each for name, each in parts.items()}, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {**SETTINGS, "base_model_name_or_path": str(base), **settings})
    return folder


def add_branch(module: nn.Module, parts: Mapping[str, Tensor], scale: float) -> None:
    """Let a layer add `scale * B(A(x))` to its output, as peft's own layers do."""
    if isinstance(module, nn.Embedding):
        first, second = parts["lora_embedding_A"], parts["lora_embedding_B"]
        module.register_forward_hook(lambda _, given, out: out + scale * first.T[given[0]] @ second.T)
        return
    first, second = parts["lora_A.weight"], parts["lora_B.weight"]
    bias, magnitude = parts.get("lora_B.bias"), parts.get("lora_magnitude_vector")
    weight = module.get_parameter("weight").detach()
    weight = weight.T if isinstance(module, Conv1D) else weight

    def forward(_: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        branch = scale * (given[0] @ first.T @ second.T)
        if bias is not None:
            branch = branch + scale * bias
        if magnitude is None:
            return out + branch
        own = getattr(module, "bias", None)
        factor = magnitude / torch.linalg.vector_norm(weight + scale * second @ first, dim=1)
        scaled: Tensor = factor * (given[0] @ weight.T + branch)
        return scaled if own is None else scaled + own

    module.register_forward_hook(forward)


def adapted(model: hf.PreTrainedModel, parts: Mapping[str, Tensor], scale: Callable[[str], float]) -> Any:
    """Give a model branches, and the weights that the adapter has whole."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, each in parts.items():
        layer, found, rest = name.partition(".lora_")
        if found:
            by_layer.setdefault(layer, {})[f"lora_{rest}"] = each
        else:
            model.get_parameter(name.replace(".base_layer", "")).data.copy_(each)
    for name, own in by_layer.items():
        add_branch(model.get_submodule(name), own, scale(name))
    return model.eval()


def loaded(folder: Path, task: Task = "auto") -> hf.PreTrainedModel:
    found = find_model(EngineConfig(model=str(folder), task=task))
    return load_transformer(found.folder, dtype=torch.float32, device=torch.device("cpu")).whole


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    torch.manual_seed(4)
    bodies.bert(folder)
    return folder


def usual(name: str) -> float:
    return 16 / RANK


FORMS: Final[Mapping[str, tuple[Callable[[nn.Module], dict[str, Tensor]], dict[str, Any], Callable[[str], float]]]] = {
    "plain": (lambda model: lora(model, "query", "value", "output.dense"), {}, usual),
    "scaled by the root": (lambda model: lora(model, "query"), {"use_rslora": True}, lambda _: 16 / math.sqrt(RANK)),
    "patterns": (
        lambda model: lora(model, "0.attention.self.query", rank=2) | lora(model, "value"),
        {
            "rank_pattern": {"layer.0.attention.self.query": 2},
            "alpha_pattern": {r"layer\.[01]\.attention\.self\.query": 32},
        },
        lambda name: 32 / 2 if name.endswith("query") else 16 / RANK,
    ),
    "magnitudes": (lambda model: with_magnitudes(lora(model, "query", "dense")), {"use_dora": True}, usual),
    "biases of a LoRA": (lambda model: with_biases(lora(model, "key")), {"lora_bias": True}, usual),
    "biases of the model": (
        lambda model: lora(model, "key") | {
            "encoder.layer.1.attention.self.key.base_layer.bias": torch.randn(bodies.WIDTH),
            "encoder.layer.1.output.LayerNorm.bias": torch.randn(bodies.WIDTH),
        },
        {"bias": "all"},
        usual,
    ),
    "words": (lambda model: lora(model, "word_embeddings", "query"), {}, usual),
    "a whole layer": (
        lambda model: lora(model, "query") | {
            "encoder.layer.2.output.dense.weight": torch.randn(bodies.WIDTH, 64),
            "encoder.layer.2.output.dense.bias": torch.randn(bodies.WIDTH),
        },
        {"modules_to_save": ["layer.2.output.dense"]},
        usual,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_merged_adapter_gives_what_its_branches_give(form: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    make, settings, scale = FORMS[form]
    model = hf.AutoModel.from_pretrained(base)
    plain = model.eval()(IDS).last_hidden_state
    parts = make(model)
    wanted = adapted(model, parts, scale)(IDS).last_hidden_state
    found = loaded(write(tmp_path / "adapter", base, parts, **settings))(IDS).last_hidden_state
    assert apart(found, wanted) <= 1e-5
    assert apart(plain, wanted) > 0.3


def test_layers_are_found_below_another_prefix_than_in_training(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(6)
    model = hf.AutoModel.from_pretrained(base)
    parts = lora(model, "query", "encoder.layer.0.output.dense")
    wanted = adapted(model, parts, usual)(IDS).last_hidden_state
    longer = {f"bert.{name}": each for name, each in parts.items()}
    assert apart(loaded(write(tmp_path / "longer", base, longer))(IDS).last_hidden_state, wanted) <= 1e-5
    hf.BertForMaskedLM.from_pretrained(base).save_pretrained(tmp_path / "headed")  # its own weights begin with `bert.`
    hf.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "headed")
    headed = write(tmp_path / "shorter", tmp_path / "headed", parts)
    assert apart(loaded(headed)(IDS).last_hidden_state, wanted) <= 1e-5
    assert apart(loaded(headed, "sparse").base_model(IDS).last_hidden_state, wanted) <= 1e-5


def test_an_adapter_of_the_pooler_is_ignored_where_nothing_reads_it(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(6)
    model = hf.AutoModel.from_pretrained(base)
    parts = lora(model, "dense")
    assert any(name.startswith("pooler.") for name in parts)
    wanted = adapted(model, parts, usual)(IDS).last_hidden_state
    assert apart(loaded(write(tmp_path / "adapter", base, parts))(IDS).last_hidden_state, wanted) <= 1e-5


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_head_of_labels_comes_from_the_adapter(task_type: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    kind = hf.BertForSequenceClassification if task_type == "SEQ_CLS" else hf.BertForTokenClassification
    model = kind.from_pretrained(base, num_labels=3)
    head = {"classifier.weight": torch.randn(3, bodies.WIDTH), "classifier.bias": torch.randn(3)}
    parts = lora(model, "query") | head
    wanted = adapted(model, parts, usual)(IDS).logits
    folder = write(tmp_path / "adapter", base, parts, task_type=task_type, modules_to_save=["classifier", "score"])
    found = find_model(EngineConfig(model=str(folder))).folder
    assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert apart(loaded(folder)(IDS).logits, wanted) <= 1e-5


def test_a_decoder_is_adapted_and_so_are_layers_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    torch.manual_seed(8)
    tokenizer = byte_bpe()
    sizes = {
        "n_embd": bodies.WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": bodies.POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    for whole, targets in (
        (hf.Qwen3ForCausalLM(bodies.qwen3_config(len(tokenizer))), ("q_proj", "v_proj")),
        (hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(tokenizer), **sizes)), ("c_attn",)),
    ):
        base = tmp_path / f"{type(whole).__name__}-base"
        bodies.save_body(base, whole, tokenizer)
        model = hf.AutoModelForCausalLM.from_pretrained(base)
        parts = with_magnitudes(lora(model, *targets))
        folder = write(tmp_path / type(whole).__name__, base, parts, use_dora=True, task_type="CAUSAL_LM")
        wanted = adapted(model, parts, usual).base_model(IDS).last_hidden_state
        found = loaded(folder, "embed")(IDS).last_hidden_state
        assert apart(found, wanted) <= 1e-4 * apart(wanted, torch.zeros(()))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2-vl", {"model.language_model.": "model.language_model.", "model.visual.": "model.visual."}),
        ("qwen2-vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
        ("qwen2-vl", {"model.language_model.": "language_model.", "model.visual.": "visual."}),
        ("colqwen2", {"vlm.language_model.": "model.", "vlm.visual.": "visual.", "embedding_": "custom_text_"}),
    ],
)
def test_a_model_of_images_is_adapted_by_the_names_of_every_version(
    kind: str, names: Mapping[str, str], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    torch.manual_seed(9)
    plain = loaded(tiny_folder(kind))
    own = {
        layer: parts
        for layer in ("q_proj", "down_proj", "attn.qkv", "embedding_proj_layer")
        if any(name.endswith(layer) for name, _ in plain.named_modules())
        for parts in [lora(plain, layer)]
    }
    parts = {name: each for one in own.values() for name, each in one.items()}
    renamed = {}
    for name, each in parts.items():
        old, new = next((old, new) for old, new in names.items() if name.startswith(old))
        renamed[(new + name.removeprefix(old)).replace("custom_text_proj_layer", "custom_text_proj")] = each
    whole = loaded(write(tmp_path / "adapter", tiny_folder(kind), renamed))
    changed = {name.partition(".lora_")[0] for name in parts}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear):
            given = torch.randn(3, module.in_features)
            wanted = plain.get_submodule(name)(given)
            if name in changed:
                first, second = parts[f"{name}.lora_A.weight"], parts[f"{name}.lora_B.weight"]
                wanted = wanted + usual(name) * given @ first.T @ second.T
            assert apart(module(given), wanted) <= 1e-4, name


def test_modules_and_texts_of_an_adapter_of_sentence_transformers(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Packed and padded, in a batch; its pooling is its own, its transformer's folder that of the base model."""
    torch.manual_seed(10)
    base = tiny_folder("bert-mean")
    parts = lora(hf.AutoModel.from_pretrained(base), "query", "output.dense")
    folder = write(tmp_path / "own", base, parts)
    for name in ("config_sentence_transformers.json", "modules.json"):
        (folder / name).write_text((tiny_folder("bert-cls") / name).read_text())
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = ""
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": bodies.WIDTH, "pooling_mode": "cls"})
    transformer = adapted(hf.AutoModel.from_pretrained(base), parts, usual)
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    texts = [text for text in (*TEXTS, *MIXED) if len(tokenizer(text)["input_ids"]) <= bodies.POSITIONS]
    rows = [transformer(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in texts]
    wanted = nn.functional.normalize(torch.stack(rows), dim=1).detach().numpy()
    layouts: tuple[Attention, ...] = ("auto", "padded")
    for attention in layouts:
        ours = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
        assert ours.card.notes == ("the adapter is merged into the weights of bert-mean",)
        assert np.abs(embed(ours, texts) - wanted).max() <= 5e-5


def test_the_modules_of_the_base_model_are_used_where_the_adapter_has_none(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """The base model is named by a path relative to the adapter; its transformer lies in a folder of its own."""
    base = tmp_path / "adapter" / "inner"
    base.parent.mkdir()
    base.symlink_to(tiny_folder("bert-cls"))
    parts = lora(hf.AutoModel.from_pretrained(base / "0_Transformer"), "query")
    found = find_model(EngineConfig(model=str(write(tmp_path / "adapter", "inner", parts)))).folder
    plain = find_model(EngineConfig(model=str(tiny_folder("bert-cls")))).folder
    assert (found.heads, found.body.name) == (plain.heads, "0_Transformer")
    assert found.path.name == "adapter"


def test_a_tokenizer_and_labels_beside_the_adapter_go_before_those_of_the_base_model(
    base: Path, tmp_path: Path
) -> None:
    parts = lora(hf.AutoModel.from_pretrained(base), "query")
    parts |= {"classifier.weight": torch.zeros(2, bodies.WIDTH), "classifier.bias": torch.zeros(2)}
    folder = write(tmp_path / "adapter", base, parts, task_type="SEQ_CLS")
    config = json.loads((base / "config.json").read_text())
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    write_json(folder / "config.json", config | labels)
    word_piece().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", model_max_length=7)
    found = find_model(EngineConfig(model=str(folder))).folder
    assert found.labels == ("no", "yes")
    assert json.loads((found.body / "tokenizer_config.json").read_text())["model_max_length"] == 7


def setting(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "adapter_config.json", **changes)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file)

    return edit


QUERY: Final = "base_model.model.encoder.layer.0.attention.self.query"


def weights_of_its_own(folder: Path) -> None:
    hf.BertModel(bodies.bert_config(50)).save_pretrained(folder)


def adapter_as_base(folder: Path) -> None:
    inner = folder / "inner"
    write(inner, "elsewhere/model", {"a.lora_A.weight": torch.zeros(1, 1)})
    edit_json(folder / "adapter_config.json", base_model_name_or_path="inner")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (setting(peft_type="IA3"), "peft_type='IA3' is not supported, only 'LORA': merge the adapter"),
        (setting(init_lora_weights="pissa_niter_16"), "init_lora_weights='pissa_niter_16' changes the weights"),
        (setting(use_qalora=True), "use_qalora=True is not supported"),
        (setting(layer_replication=[[0, 2]]), "layer_replication="),
        (setting(trainable_token_indices=[1]), "trainable_token_indices="),
        (setting(new_kind={"a": 1}), "new_kind="),
        (setting(task_type="QUESTION_ANS"), "task_type='QUESTION_ANS' is not supported"),
        (setting(task_type="SEQ_CLS"), "has no head of labels"),
        (setting(bias="some"), "bias='some' is not known"),
        (setting(base_model_name_or_path=None), "base_model_name_or_path is missing"),
        (setting(base_model_name_or_path="/no/such"), "the base model cannot be found: .*there is no such folder"),
        (setting(base_model_name_or_path="org/absent"), "the base model cannot be found: .*not in the hub's"),
        (setting(lora_alpha="16"), "lora_alpha and the values of alpha_pattern must be numbers, not '16'"),
        (setting(alpha_pattern={"(": 1}), "no regular expression"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors beside"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "the weights are damaged"),
        (weights_of_its_own, "has an adapter and weights of its own"),
        (adapter_as_base, "the base model inner is an adapter too|the base model .* is an adapter too"),
        (tensors(lambda all: all.pop(f"{QUERY}.lora_B.weight")), "query is a Linear, whose LoRA .* lacks a part"),
        (tensors(lambda all: all.update({f"{QUERY}.lora_C": torch.zeros(1)})), "lora_C is not a part of a LoRA"),
        (tensors(lambda all: all.update({f"{QUERY}.lora_A.weight": torch.zeros(3, 32)})), "do not fit each other"),
        (tensors(lambda all: all.update({f"{QUERY}.lora_A.weight": torch.zeros(4, 16)})), r"has the shape \[32, 16\]"),
        (tensors(lambda all: all.update({f"{QUERY}.base_layer.bias": torch.zeros(3)})), r"has the shape \[3\], but"),
        (
            tensors(lambda all: all.update({f"{QUERY.replace('query', 'q')}.lora_A.weight": torch.zeros(4, 32)})),
            "self.q fits no weight of the base model",
        ),
        (
            tensors(lambda all: all.update({"base_model.model.query.bias": torch.zeros(32)})),
            "query may be .* or .* of the base model",
        ),
        (
            tensors(lambda all: all.update({f"{QUERY}.lora_embedding_A": torch.zeros(32)})),
            "lora_embedding_A does not belong to a Linear",
        ),
    ],
)  # fmt: skip
def test_an_adapter_that_is_not_understood_is_rejected(
    spoil: Callable[[Path], None], message: str, base: Path, tmp_path: Path
) -> None:
    parts = lora(hf.AutoModel.from_pretrained(base), "query")
    folder = write(tmp_path / "adapter", base, parts)
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32", offline=True))


def test_an_adapter_is_checked_before_its_base_model_is_downloaded(base: Path, tmp_path: Path) -> None:
    parts = lora(hf.AutoModel.from_pretrained(base), "query")
    folder = write(tmp_path / "adapter", "org/absent", parts)
    check_model(EngineConfig(model=str(folder)))
    edit_json(folder / "adapter_config.json", peft_type="VERA")
    with pytest.raises(ConfigError, match="peft_type='VERA'"):
        check_model(EngineConfig(model=str(folder)))


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_written_into_either_folder(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", base, lora(hf.AutoModel.from_pretrained(base), "query"))
    before = names(base), names(folder)
    composed = find_model(EngineConfig(model=str(folder))).folder.path
    assert (names(base), names(folder)) == before
    assert tmp_path not in composed.parents
