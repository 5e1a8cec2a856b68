"""Adapters that share the weights of their base model, against layers with a branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers as hf

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.runtime.models.checkpoint.weights import load_transformer
from staged_pool.runtime.models.find import find_model
from staged_pool.runtime.models.load_shared import load_sharing
from staged_pool.runtime.models.sharing import share_bases
from staged_pool.runtime.models.specs.adapters import AdapterSpec
from staged_pool.runtime.models.transformer.adapters import Adapters
from staged_pool.stages.errors import ConfigError
from tests.models.dtypes import needs_int8
from tests.models.folders.test_adapters import FORMS, IDS, adapted, apart, lora, usual, with_magnitudes, write
from tests.models.tiny import bodies, edit_json, pooling_flags, write_json, write_modules, write_prompts
from tests.models.tiny.vocabularies import byte_bpe

TEXTS = ["A man is eating food.", "short", "The stock market fell sharply today, and then it rose again. " * 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "base"
    torch.manual_seed(4)
    bodies.bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_prompts(folder, {"query": "query: "})
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    """One of each form, beside the base model."""
    found: dict[str, Path] = {}
    for number, (form, (make, settings, _)) in enumerate(FORMS.items()):
        torch.manual_seed(number)
        parts = make(hf.AutoModel.from_pretrained(base))
        found[form] = write(base.parent / form.replace(" ", "-"), base, parts, **settings)
    return found


def branches(base: Path, form: str) -> Any:
    torch.manual_seed([*FORMS].index(form))
    make, _, scale = FORMS[form]
    model = hf.AutoModel.from_pretrained(base)
    return adapted(model, make(model), scale)


def config(folder: Path, name: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), served_name=name, dtype="float32", torch_threads=1, **settings)


def test_each_form_gives_what_its_branches_give_while_all_are_there(base: Path, adapters: Mapping[str, Path]) -> None:
    folder = find_model(EngineConfig(model=str(base))).folder
    folder = replace(folder, adapters=tuple(AdapterSpec(form, path) for form, path in adapters.items()))
    loaded = load_transformer(folder, dtype=torch.float32, device=torch.device("cpu"))
    plain = loaded.base(IDS).last_hidden_state
    both = Adapters(loaded.base, loaded.adapters)
    for form in [*FORMS] * 2:
        with both.use(form):
            found = loaded.base(IDS).last_hidden_state
        wanted = branches(base, form)(IDS).last_hidden_state
        assert apart(found, wanted) <= 1e-5
        assert apart(plain, wanted) > 0.3
    assert apart(loaded.base(IDS).last_hidden_state, plain) == 0.0


def test_layers_of_decoders_are_adapted_beside_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(8)
    tokenizer = byte_bpe()
    sizes = {"n_embd": bodies.WIDTH, "n_layer": 2, "n_head": 4, "n_positions": bodies.POSITIONS}
    for whole, targets in (
        (hf.Qwen3Model(bodies.qwen3_config(len(tokenizer))), ("q_proj", "v_proj")),
        (hf.GPT2Model(hf.GPT2Config(vocab_size=len(tokenizer), **sizes)), ("c_attn",)),
    ):
        base = tmp_path / type(whole).__name__
        bodies.save_body(base, whole, tokenizer)
        model = hf.AutoModel.from_pretrained(base)
        parts = with_magnitudes(lora(model, *targets))
        adapter = write(tmp_path / f"{type(whole).__name__}-adapter", base, parts, use_dora=True)
        folder = replace(find_model(EngineConfig(model=str(base))).folder, adapters=(AdapterSpec("one", adapter),))
        loaded = load_transformer(folder, dtype=torch.float32, device=torch.device("cpu"))
        wanted = adapted(model, parts, usual)(IDS).last_hidden_state
        with Adapters(loaded.base, loaded.adapters).use("one"):
            found = loaded.base(IDS).last_hidden_state
        assert apart(found, wanted) <= 1e-4 * apart(wanted, torch.zeros(()))


@pytest.mark.anyio
@pytest.mark.parametrize("with_base", [True, False])
async def test_models_on_one_base_answer_at_once_as_each_would_alone(
    with_base: bool,
    base: Path,
    adapters: Mapping[str, Path],
) -> None:
    folders = {"base": base} if with_base else {}
    folders |= {form: adapters[form] for form in ("plain", "magnitudes", "words")}
    wanted: dict[str, Any] = {}
    for name, folder in folders.items():
        async with open_engine(config(folder, name)) as alone:
            wanted[name] = [
                (await alone.embed(TEXTS, prompt_name=prompt)).embeddings for prompt in (None, "query", None, "query")
            ]
    found: dict[str, list[Any]] = {name: [] for name in folders}
    async with open_engines([config(folder, name) for name, folder in folders.items()]) as engines:
        assert tuple(engines) == tuple(folders)

        async def ask(name: str, engine: Engine) -> None:
            for prompt in (None, "query", None, "query"):
                found[name].append((await engine.embed(TEXTS, prompt_name=prompt)).embeddings)

        async with anyio.create_task_group() as tasks:
            for name, engine in engines.items():
                tasks.start_soon(ask, name, engine)
        first, *_, last = engines.values()
        towers = {id(engine._model.replicas) for engine in engines.values()}  # type: ignore[attr-defined]
        weights = {id(engine._model.towers["text"]) for engine in engines.values()}  # type: ignore[attr-defined]
        assert (len(towers), len(weights)) == (len(folders), 1)
        note = f"which it shares with {', '.join([*folders][:-1])}"
        assert any(note in each for each in last.card.notes)
        await engines.unload(first)  # the others keep the weights
        again = (await last.embed(TEXTS)).embeddings
    assert np.abs(again - wanted[[*folders][-1]][0]).max() <= 1e-5
    for name in folders:
        for one, other in zip(found[name], wanted[name], strict=True):
            assert np.abs(one - other).max() <= 1e-5
    assert np.abs(found["plain"][0] - found["words"][0]).max() > 0.05


@needs_int8
def test_int8_is_not_for_models_with_adapters_to_choose_from(base: Path, adapters: Mapping[str, Path]) -> None:
    settings = [config(folder, name) for name, folder in adapters.items()][:2]
    models = [find_model(each) for each in settings]
    (sharing,) = share_bases(list(zip(settings, models, strict=True)))
    assert sharing.base is not None
    settings = [replace(each, dtype="int8") for each in settings]
    assert groups(*settings) == [(0,), (1,)]  # each is merged into weights of its own
    with pytest.raises(ConfigError, match="dtype='int8': is not for models with several adapters"):
        load_sharing(settings[0], sharing.base, models)


def groups(*configs: EngineConfig) -> list[tuple[int, ...]]:
    return [sharing.places for sharing in share_bases([(each, find_model(each)) for each in configs])]


def test_models_share_weights_only_where_all_else_is_equal(
    base: Path, adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    plain, words = config(adapters["plain"], "plain"), config(adapters["words"], "words")
    assert groups(config(base, "base"), plain, words) == [(0, 1, 2)]
    assert groups(plain, config(base, "base")) == [(0, 1)]
    assert groups(plain, replace(words, attention="padded")) == [(0,), (1,)]
    assert groups(config(base, "one"), config(base, "two")) == [(0,), (1,)]
    assert groups(plain, words, config(adapters["a whole layer"], "own layers")) == [(0, 1), (2,)]
    model = hf.AutoModel.from_pretrained(base)
    other_words = write(tmp_path / "tokenizer", base, lora(model, "query"))
    hf.AutoTokenizer.from_pretrained(base).save_pretrained(other_words)
    edit_json(other_words / "tokenizer_config.json", model_max_length=9)
    other_pooling = write(tmp_path / "pooling", base, lora(model, "query"))
    write_modules(other_pooling, ("Pooling", pooling_flags("cls_token")), ("Normalize", {}))
    other_length = write(tmp_path / "length", base, lora(model, "query"))
    write_modules(other_length, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(other_length / "sentence_bert_config.json", {"max_seq_length": 7})
    for other in (other_words, other_pooling, other_length):
        assert groups(plain, config(other, "other"), words) == [(0, 2), (1,)]


def test_an_adapter_has_a_similarity_and_prompts_of_its_own(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "own", base, lora(hf.AutoModel.from_pretrained(base), "query"))
    settings = {"similarity_fn_name": "dot", "prompts": {"document": "text: "}}
    write_json(adapter / "config_sentence_transformers.json", settings)
    given = [config(base, "base"), config(adapter, "own")]
    found = [find_model(each) for each in given]
    [sharing] = share_bases(list(zip(given, found, strict=True)))
    assert sharing.base is not None
    cards = [model.card for model in load_sharing(given[0], sharing.base, found)]
    assert [card.similarity for card in cards] == ["cosine", "dot"]
    assert [card.prompts for card in cards] == [{"query": "query: "}, {"document": "text: "}]


def test_an_adapter_that_gives_no_numbers_is_named(base: Path, tmp_path: Path) -> None:
    parts = lora(hf.AutoModel.from_pretrained(base), "intermediate.dense")
    broken = write(tmp_path / "broken", base, {name: torch.full_like(each, torch.nan) for name, each in parts.items()})
    given = [config(base, "base"), config(broken, "broken")]
    [sharing] = share_bases([(each, find_model(each)) for each in given])
    assert sharing.base is not None
    with pytest.raises(ConfigError, match="the weights of the adapter broken cannot be used"):
        load_sharing(given[0], sharing.base, [find_model(each) for each in given])
