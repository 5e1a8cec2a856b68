"""Models with an adapter for each task, against their formula with merged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from staged_pool.api.wire import jina
from staged_pool.runtime.caching.fingerprints import Identities
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.encoding.vectors import encoding
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.remote.arrays import Block, pack_payload, unpack_payload
from staged_pool.runtime.remote.limits import PayloadLimits
from staged_pool.runtime.requests import DENSE_ONLY, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared
from tests.models import nomic_oracle
from tests.models.requests import score, text_tower
from tests.models.tiny import byte_bpe, edit_json, pooling_flags, unigram, write_json, write_modules, write_prompts
from tests.models.tiny.bodies import widen
from tests.models.vectors.test_oracle import MIXED, embed

CLOSE = 2e-5
TEXTS = ["A man is eating food.", "x", *MIXED[:6], " ".join(MIXED)[:500]]
V3_TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
V3_PROMPTS = {"retrieval.query": "Represent the query: ", "retrieval.passage": "Represent the document: "}
V5_TASKS = ["retrieval", "text-matching", "clustering", "classification"]
RANK, ALPHA = 4, 3
FIRST = "custom_st.Transformer"
_CODE = "jinaai/xlm-roberta-flash-implementation--"


def _v3(folder: Path) -> None:
    """jina-embeddings-v3."""
    tokenizer = unigram()
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=512)
    config = {
        "architectures": ["XLMRobertaLoRA"],
        "auto_map": {
            "AutoConfig": f"{_CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{_CODE}modeling_lora.XLMRobertaLoRA",
        },
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 40,
        "layer_norm_eps": 1e-5,
        "load_trained_adapters": True,
        "lora_adaptations": V3_TASKS,
        "lora_alpha": ALPHA,
        "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False,
        "lora_rank": RANK,
        "matryoshka_dimensions": [8, 16, 32],
        "max_position_embeddings": 514,
        "model_type": "xlm-roberta",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "rotary_emb_base": 500.0,
        "task_instructions": {**dict.fromkeys(V3_TASKS, ""), **V3_PROMPTS},
        "torch_dtype": "bfloat16",
        "truncate_dim": None,
        "type_vocab_size": 1,
        "use_flash_attn": True,
        "vocab_size": len(tokenizer),
    }
    write_json(folder / "config.json", config)
    published: dict[str, Tensor] = {"roberta.pooler.dense.bias": torch.randn(32)}
    base = {**nomic_oracle.random_tensors(_as_nomic(config)), "pooler.dense.weight": torch.randn(32, 32)}
    for name, tensor in base.items():
        own = "roberta." + name.replace(".attn.", ".mixer.")
        if tensor.dim() == 1:
            published[own] = tensor
            continue
        rows, columns = tensor.shape
        embedding = "embeddings" in name
        shapes = [(rows, RANK), (RANK, columns)] if embedding else [(RANK, columns), (rows, RANK)]
        published[f"{own.removesuffix('.weight')}.parametrizations.weight.original"] = tensor
        for part, shape in zip("AB", shapes, strict=True):
            key = f"{own.removesuffix('.weight')}.parametrizations.weight.0.lora_{part}"
            published[key] = torch.randn(len(V3_TASKS), *shape) * 0.3
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}), first=FIRST)
    write_prompts(folder, V3_PROMPTS)


def _as_nomic(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture by the names of another family, whose formula is known."""
    return {
        "n_head": config["num_attention_heads"],
        "n_embd": config["hidden_size"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "type_vocab_size": config["type_vocab_size"],
        "vocab_size": config["vocab_size"],
        "layer_norm_epsilon": config["layer_norm_eps"],
        "rotary_emb_base": config["rotary_emb_base"],
        "rotary_scaling_factor": None,
        "max_trained_positions": 0,
        "qkv_proj_bias": True,
        "activation_function": "gelu",
    }


def _v3_wanted(folder: Path, texts: list[str], task: str | None) -> Any:
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        place, _, part = name.partition(".parametrizations.weight.")
        own = place.removeprefix("roberta.").replace(".mixer.", ".attn.")
        if not part:
            tensors[own] = tensor
        elif part == "original":
            first, second = (stored[f"{place}.parametrizations.weight.0.lora_{side}"].double() for side in "AB")
            order = (first, second) if "embeddings" in place else (second, first)
            number = None if task is None else V3_TASKS.index(task)
            merged = 0 if number is None else ALPHA / RANK * (order[0][number] @ order[1][number])
            tensors[f"{own}.weight"] = tensor.double() + merged
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=512).input_ids
        vectors = nomic_oracle.hidden(tensors, _as_nomic(config), ids)
        rows.append(functional.normalize(vectors.mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


def _v5(kind: str) -> Callable[[Path], None]:
    """jina-embeddings-v5-text-small (Qwen3) and -nano (EuroBERT)."""

    def make(folder: Path) -> None:
        tokenizer = byte_bpe(begin="" if kind == "Qwen3" else "<s>")
        sizes = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        }
        more = {"mask_token_id": 3} if kind == "EuroBert" else {}
        model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes, **more))
        widen(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        edit_json(
            folder / "config.json",
            model_type="jina_embeddings_v5",
            architectures=["JinaEmbeddingsV5Model"],
            auto_map={"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
            task_names=V5_TASKS,
            **({"is_decoder": False} if kind == "EuroBert" else {}),
        )
        for task in V5_TASKS:
            _write_peft(folder / "adapters" / task, model, ("q_proj", "v_proj", "down_proj"))
        write_modules(folder, first=FIRST)  # it pools and normalises
        write_prompts(folder, {"query": "Query: ", "document": "Document: "})

    return make


def _write_peft(folder: Path, model: hf.PreTrainedModel, targets: tuple[str, ...]) -> None:
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if name.endswith(targets):
            rows, columns = layer.weight.shape
            if isinstance(layer, torch.nn.Embedding):
                tensors[f"base_model.model.{name}.lora_embedding_A"] = torch.randn(RANK, rows) * 0.3
                tensors[f"base_model.model.{name}.lora_embedding_B"] = torch.randn(columns, RANK) * 0.3
                continue
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns) * 0.3
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "task_type": "FEATURE_EXTRACTION"}
    write_json(folder / "adapter_config.json", settings)


def _v5_wanted(folder: Path, texts: list[str], task: str | None) -> Any:
    name = "EuroBert" if "is_decoder" in json.loads((folder / "config.json").read_text()) else "Qwen3"
    config = json.loads((folder / "config.json").read_text())
    for field in ("model_type", "is_decoder", "auto_map", "task_names"):
        config.pop(field, None)
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**config)).eval()
    tensors = load_file(folder / "model.safetensors")
    adapter = {} if task is None else load_file(folder / "adapters" / task / "adapter_model.safetensors")
    for key in [key for key in adapter if "lora_A" in key]:
        change = ALPHA / RANK * (adapter[key.replace("lora_A", "lora_B")].double() @ adapter[key].double())
        own = key.removeprefix("base_model.model.").replace("lora_A.", "")
        tensors[own] = (tensors[own].double() + change).float()
    model.load_state_dict(tensors)
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        with torch.inference_mode():
            vectors = model(**tokenizer(text, truncation=True, max_length=512, return_tensors="pt")).last_hidden_state
        rows.append(functional.normalize(vectors[0, -1], dim=0))
    return torch.stack(rows).numpy()


def _v3_hf(folder: Path) -> None:
    """jina-embeddings-v3-hf."""
    tokenizer = unigram()
    model = hf.JinaEmbeddingsV3Model(
        hf.JinaEmbeddingsV3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=514, pad_token_id=1, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    widen(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=512)
    edit_json(folder / "config.json", lora_adaptations=V3_TASKS, task_instructions=V3_PROMPTS)
    for task in V3_TASKS:
        _write_peft(folder / task.replace(".", "_").replace("-", "_"), model, ("word_embeddings", "q_proj", "fc2"))


def _v3_hf_wanted(folder: Path, texts: list[str], task: str | None) -> Any:
    model = hf.JinaEmbeddingsV3Model.from_pretrained(folder, add_pooling_layer=False).eval()
    if task is not None:
        adapter = load_file(folder / task.replace(".", "_").replace("-", "_") / "adapter_model.safetensors")
        for key in [key for key in adapter if "_A" in key]:
            first, second = adapter[key].double(), adapter[key.replace("_A", "_B")].double()
            weight = model.get_parameter(f"{key.removeprefix('base_model.model.').partition('.lora_')[0]}.weight")
            change = ALPHA / RANK * second @ first
            with torch.no_grad():
                weight += (change.T if "embedding_A" in key else change).float()
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        given = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            vectors = model(input_ids=given["input_ids"]).last_hidden_state
        rows.append(functional.normalize(vectors[0].mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


MAKERS: dict[str, Callable[[Path], None]] = {
    "v3": _v3,
    "v3-hf": _v3_hf,
    "v5-small": _v5("Qwen3"),
    "v5-nano": _v5("EuroBert"),
}
LAYOUTS = [(kind, attention) for kind in MAKERS for attention in ("packed", "padded")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(7)
    root = tmp_path_factory.mktemp("tasks")
    for name, make in MAKERS.items():
        (root / name).mkdir()
        make(root / name)
    return {name: root / name for name in MAKERS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Callable[[str, str], Encoder]:
    loaded: dict[tuple[str, str], Encoder] = {}

    def load(kind: str, attention: Any) -> Encoder:
        if (kind, attention) not in loaded:
            config = EngineConfig(model=str(folders[kind]), dtype="float32", attention=attention)
            loaded[kind, attention] = load_model(config)
        return loaded[kind, attention]

    return load


@pytest.mark.parametrize(("kind", "attention"), LAYOUTS)
def test_each_task_has_the_vectors_of_merged_weights(
    kind: str, attention: str, folders: dict[str, Path], models: Callable[[str, str], Encoder]
) -> None:
    model = models(kind, attention)
    assert model.card.attention == attention
    if kind.startswith("v3"):
        wanted_of = _v3_wanted if kind == "v3" else _v3_hf_wanted
        for task in V3_TASKS:
            texts = [V3_PROMPTS.get(task, "") + text for text in TEXTS]
            assert np.abs(embed(model, TEXTS, prompt_name=task) - wanted_of(folders[kind], texts, task)).max() <= CLOSE
        plain = wanted_of(folders[kind], TEXTS, None)
        assert np.abs(embed(model, TEXTS) - plain).max() <= CLOSE
        assert np.abs(plain - wanted_of(folders[kind], TEXTS, "separation")).max() > 0.05
        return
    for task in V5_TASKS:
        for ending, prompt in (("", "Document: "), (".query", "Query: ")):
            wanted = _v5_wanted(folders[kind], [prompt + text for text in TEXTS], task)
            assert np.abs(embed(model, TEXTS, prompt_name=f"{task}{ending}") - wanted).max() <= CLOSE
    usual = _v5_wanted(folders[kind], [f"Document: {text}" for text in TEXTS], "retrieval")
    assert np.abs(embed(model, TEXTS) - usual).max() <= CLOSE
    assert np.abs(usual - _v5_wanted(folders[kind], [f"Document: {text}" for text in TEXTS], "clustering")).max() > 0.05


def test_a_query_and_its_documents_are_read_by_their_adapters(
    folders: dict[str, Path], models: Callable[[str, str], Encoder]
) -> None:
    model = models("v3", "packed")
    query = _v3_wanted(folders["v3"], [V3_PROMPTS["retrieval.query"] + TEXTS[0]], "retrieval.query")[0]
    documents = _v3_wanted(
        folders["v3"], [V3_PROMPTS["retrieval.passage"] + text for text in TEXTS[1:4]], "retrieval.passage"
    )
    assert np.abs(score(model, TEXTS[0], TEXTS[1:4]).scores - documents @ query).max() <= CLOSE
    assert np.array_equal(
        embed(model, TEXTS[:2], prompt_name="query"), embed(model, TEXTS[:2], prompt_name="retrieval.query")
    )
    with pytest.raises(InvalidInput, match="prompt_name"):
        embed(model, TEXTS[:1], prompt_name="retrieval.mine")


def test_inputs_of_different_adapters_share_neither_a_batch_nor_a_row(models: Callable[[str, str], Encoder]) -> None:
    model = models("v3", "packed")
    given = [ModelInput(TextInput("a text"), DENSE_ONLY, adapter=name) for name in (*V3_TASKS, None)]
    made = [one for one in model.preprocess(given) if isinstance(one, Prepared)]
    assert len({one.batch_key for one in made}) == len({Identities(b"x" * 32).of(one.payload) for one in made}) == 6
    assert len({tuple(one.payload.ids) for one in made}) == 1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="too many values to unpack"):
        model.forward([one.payload for one in made[:2]])
    with pytest.raises(ValueError, match="there is no adapter 'mine'"):
        model.forward([TokenSequence([5], DENSE_ONLY, adapter="mine")])
    parts: list[Any] = []
    packed = pack_payload(made[2].payload, parts)
    limits = PayloadLimits.of("text", model.card, model.preparation)
    assert unpack_payload(packed, Block(b"".join(bytes(part) for part in parts)), limits) == made[2].payload


@pytest.mark.anyio
async def test_requests_of_all_tasks_at_once_have_their_own_vectors(
    folders: dict[str, Path], models: Callable[[str, str], Encoder]
) -> None:
    names = [*V3_TASKS, None]
    wanted = {name: embed(models("v3-hf", "packed"), TEXTS, prompt_name=name) for name in names}
    found: dict[str | None, list[Any]] = {name: [] for name in names}
    async with open_engine(EngineConfig(model=str(folders["v3-hf"]), dtype="float32", torch_threads=1)) as engine:

        async def ask(name: str | None) -> None:
            for _ in range(3):
                found[name].append((await engine.embed(TEXTS, prompt_name=name)).embeddings)

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(ask, name)
    for name in names:
        assert max(np.abs(each - wanted[name]).max() for each in found[name]) <= CLOSE


def test_a_task_of_jinas_api_names_the_prompt_that_has_its_adapter(models: Callable[[str, str], Encoder]) -> None:
    v3, v5 = models("v3", "packed").card, models("v5-small", "packed").card
    for card, task, adapter in (
        (v3, "retrieval.query", "retrieval.query"),
        (v3, "separation", "separation"),
        (v5, "retrieval.passage", "retrieval"),
        (v5, "clustering", "clustering"),
    ):
        name = jina.prompt_name(task, card)
        assert name == task
        assert card.adapters[name] == adapter
    assert v5.prompts["retrieval.passage"] == v5.prompts["clustering"] == "Document: "
    assert v5.prompts["text-matching.query"] == "Query: "


def test_encode_takes_tasks_as_the_authors_code_does(models: Callable[[str, str], Encoder]) -> None:
    def chosen(kind: str, **options: Any) -> tuple[Any, Any]:
        found = encoding(models(kind, "packed").card, ["a"], (), options).embed
        return found["prompt"], found["prompt_name"]

    assert chosen("v3", task="retrieval.query", prompt_name="retrieval.query") == (None, "retrieval.query")
    assert chosen("v3", task="separation") == (None, "separation")
    assert chosen("v5-small", task="clustering", prompt_name="query") == (None, "clustering.query")
    assert chosen("v5-small", task="retrieval") == (None, "retrieval")
    with pytest.raises(InvalidInput, match="task='separation' does not fit prompt_name"):
        chosen("v3", task="separation", prompt_name="retrieval.query")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("v3", {"position_embedding_type": "absolute"}, "position_embedding_type='absolute' is not supported"),
        ("v3", {"load_trained_adapters": False}, "load_trained_adapters must be true"),
        ("v3", {"lora_adaptations": V3_TASKS[:4]}, "must have one LoRA for each of the 4 tasks"),
        ("v3", {"lora_rank": None}, "lora_rank is missing"),
        ("v5-small", {"task_names": ["retrieval", "mine"]}, "there is no folder adapters/mine"),
        ("v5-small", {"task_names": ["../retrieval"]}, "which is no name of a task"),
        ("v5-small", {"architectures": ["JinaMine"]}, "only JinaEmbeddingsV5Model"),
    ],
)
def test_what_is_not_understood_is_rejected(
    kind: str, changes: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_the_parameters_of_all_adapters_count(models: Callable[[str, str], Encoder]) -> None:
    transformer = text_tower(models("v3", "packed")).transformer
    assert transformer.adapters is not None
    assert tuple(transformer.adapters.names) == tuple(V3_TASKS)
