"""Process reward models, against Qwen2 of transformers and two layers by hand.

The layout is that of Qwen2.5-Math-PRM.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
import transformers as hf
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file

import staged_pool
from staged_pool import Chat, Pool
from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import MODEL_MAX, Output, TextInput, TokenClassifyRequest
from staged_pool.runtime.results import TokenClassifyResult
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import client_of
from tests.models.oracle import Array
from tests.models.requests import result_of
from tests.models.tiny import edit_json
from tests.models.tiny.bodies import WIDTH, save, widen
from tests.models.tiny.vocabularies import chat_bpe

TAG: Final = "<extra_0>"
TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS: Final = ["A man has two cats.", "He gives one away. 🙂", "", "So one is left."]
TEXTS: Final = [TAG.join([*STEPS, ""]), f"short{TAG}", f"{TAG}{TAG} no tag behind this", f"What? {TAG}\n\n" * 9]
CLOSE: Final = 2e-5
ClientOf = Any

__all__ = ["client_of"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As its authors save it: a language model with an unused head, and two layers behind the tags."""
    path = tmp_path_factory.mktemp("prm") / "math-prm"
    torch.manual_seed(3)
    tokenizer = chat_bpe()
    tokenizer.add_tokens([TAG], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    config = hf.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = hf.Qwen2ForCausalLM(config)
    widen(model)
    save(path, model, tokenizer)
    tensors = load_file(path / "model.safetensors")
    for place, outputs in ((0, WIDTH), (2, 2)):
        tensors[f"score.{place}.weight"] = torch.randn(outputs, WIDTH) * 0.3
        tensors[f"score.{place}.bias"] = torch.randn(outputs) * 0.3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    own = {"AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig"}
    own["AutoModel"] = "modeling_qwen2_rm.Qwen2ForProcessRewardModel"
    edit_json(path / "config.json", architectures=["Qwen2ForProcessRewardModel"], auto_map=own)
    return path


def load(folder: Path, attention: Attention = "auto") -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))


@pytest.fixture(scope="module")
def model(folder: Path) -> Encoder:
    return load(folder)


def expected(folder: Path, texts: Sequence[str]) -> list[Array]:
    """Return the logits at each tag, one text at a time: W2 relu(W0 h + b0) + b2."""
    body, weights = hf.Qwen2Model.from_pretrained(folder).eval(), load_file(folder / "model.safetensors")
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            hidden = body(ids).last_hidden_state[0][ids[0] == tokenizer.convert_tokens_to_ids(TAG)]
            inner = (hidden @ weights["score.0.weight"].T + weights["score.0.bias"]).clamp(min=0)
            found.append((inner @ weights["score.2.weight"].T + weights["score.2.bias"]).numpy())
    return found


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def run(model: Encoder, sources: Sequence[Any], **settings: Any) -> TokenClassifyResult:
    """Return the result of a request whose inputs are all in one batch."""
    inputs = tuple(source if isinstance(source, TextInput) else TextInput(source) for source in sources)
    result: TokenClassifyResult = result_of(model, TokenClassifyRequest(inputs=inputs, **settings))
    return result


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_each_step_has_the_scores_of_its_tag(folder: Path, attention: Attention) -> None:
    model = load(folder, attention)
    assert (model.card.outputs, model.card.labels) == ((Output.TOKEN_LABELS,), ("negative", "positive"))
    logits = expected(folder, TEXTS)
    found = run(model, TEXTS)
    assert [len(rows) for rows in found.scores] == [4, 1, 2, 9]
    for text, rows, wanted in zip(TEXTS, found.scores, logits, strict=True):
        assert_allclose(rows, softmax(wanted), atol=CLOSE)
        assert_allclose(run(model, [text]).scores[0], rows, atol=CLOSE)
        assert_allclose(run(model, [text], activate=False).scores[0], wanted, atol=5 * CLOSE)
    assert np.ptp(np.concatenate(logits), axis=0).min() > 1  # the steps differ


def test_steps_are_entities_with_their_texts(model: Encoder) -> None:
    found = run(model, TEXTS)
    assert found.offsets is not None
    for text, steps, rows, tags in zip(TEXTS, found.entities, found.scores, found.offsets, strict=True):
        assert [step.text for step in steps] == text.split(TAG)[:-1]
        assert_allclose([step.score for step in steps], rows[:, 1])
        assert tags is not None
        assert [text[start:end] for start, end in tags] == [TAG] * len(steps)
        assert all(step.label == "positive" and text[step.start : step.end] == step.text for step in steps)


def test_token_ids_and_conversations(folder: Path, model: Encoder) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    messages = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": TEXTS[0]})
    written = tokenizer.apply_chat_template(list(messages), tokenize=False)
    ids = tuple(tokenizer(written, add_special_tokens=False)["input_ids"])
    wanted = softmax(expected(folder, [written])[0])
    found = run(model, [TextInput(Chat(messages), add_special_tokens=False), ids, written])
    for rows in found.scores:
        assert_allclose(rows, wanted, atol=CLOSE)
    assert [len(steps) for steps in found.entities] == [0, 0, 4]
    with Pool(str(folder), dtype="float32", device="cpu") as pool:
        assert_allclose(pool.classify_tokens(Chat(messages)).scores[0], wanted, atol=CLOSE)
        assert len(pool.classify_tokens([TEXTS[0]] * 300).scores) == 300


def test_a_cut_text_has_the_steps_that_are_left(folder: Path, model: Encoder) -> None:
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]
    kept = ids[:30].count(tokenizer.convert_tokens_to_ids(TAG))
    assert 0 < kept < 9
    found = run(model, [TextInput(TEXTS[3], max_tokens=30)])
    assert_allclose(found.scores[0], run(model, TEXTS[3:]).scores[0][:kept], atol=CLOSE)  # it reads from left to right
    with pytest.raises(InvalidInput, match="This model's maximum context length is 128 tokens"):
        run(model, [TEXTS[3] * 9])
    assert len(run(model, [TextInput(TEXTS[3] * 9, max_tokens=MODEL_MAX)]).scores[0]) > 9


@pytest.mark.parametrize("source", ["no tag", "", (5, 6), TextInput(f"some words before it {TAG}", max_tokens=2)])
def test_a_text_without_a_step_is_an_error(source: Any, model: Encoder) -> None:
    with pytest.raises(InvalidInput, match=f"no step: put {TAG} behind each step|no tokens"):
        run(model, [source])


def test_over_http(folder: Path, client_of: ClientOf) -> None:
    """As vLLM answers `token_classify` with a step tag, and the steps as entities."""
    client: httpx.Client = client_of(folder)
    wanted = [softmax(rows) for rows in expected(folder, TEXTS)]
    got = answer(client, "/pooling", input=TEXTS, task="token_classify", return_offsets=True)["data"]
    for row, rows in zip(got, wanted, strict=True):
        assert_allclose(row["data"], rows, atol=1e-4)
        assert len(row["offsets"]) == len(rows)
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": TEXTS[0]}]
    written = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    [row] = answer(client, "/pooling", messages=messages)["data"]
    assert_allclose(row["data"], softmax(expected(folder, [written])[0]), atol=1e-4)
    entities = answer(client, "/classify_tokens", input=TEXTS[0])["data"][0]["entities"]
    assert [step["text"] for step in entities] == STEPS
    assert_allclose([step["score"] for step in entities], wanted[0][:, 1], atol=1e-4)
    with staged_pool.Client(str(client.base_url)) as ours:
        found = ours.classify_tokens(TEXTS).entities
        assert_allclose([step.score for step in found[0]], wanted[0][:, 1], atol=1e-4)
    error = rejection(client, "/pooling", 400, input=[TEXTS[0], "no tag"], task="token_classify")["error"]
    assert (error["param"], error["message"]) == (
        "input",
        f"input[1]: The text has no step: put {TAG} behind each step, within the limit of its tokens.",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "is supported with model_type='qwen2', not 'llama'"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "score.2.weight gives 2 values, and not 3, one for each label"),
    ],
)
def test_other_folders_are_rejected(changes: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path)
    edit_json(copy / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load(copy)


def test_weights_and_the_tag_must_be_there(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    del tensors["score.2.bias"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"there is no tensor score\.2\.bias"):
        load(copy)
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace(TAG, "<extra_1>"))
    with pytest.raises(ConfigError, match=f"there is no token '{TAG}', which marks the end of each step"):
        load(copy)


def test_a_reward_model_scores_a_whole_conversation(folder: Path, tmp_path: Path) -> None:
    """Qwen2.5-Math-RM: one value, of the last token, without an activation."""
    copy = copied(folder, tmp_path)
    weights = load_file(copy / "model.safetensors")
    weights["score.2.weight"], weights["score.2.bias"] = (
        weights["score.2.weight"][:1] * 1,
        weights["score.2.bias"][:1] * 1,
    )
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    edit_json(copy / "config.json", architectures=["Qwen2ForRewardModel"])
    messages = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": "So one is left."})
    tokenizer = hf.AutoTokenizer.from_pretrained(copy)
    texts = [tokenizer.apply_chat_template(list(messages), tokenize=False), "short", TEXTS[0]]
    body, wanted = hf.Qwen2Model.from_pretrained(copy).eval(), []
    for text in texts:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            inner = (body(ids).last_hidden_state[0, -1] @ weights["score.0.weight"].T + weights["score.0.bias"]).clamp(
                min=0
            )
            wanted.append((inner @ weights["score.2.weight"].T + weights["score.2.bias"]).tolist())
    with Pool(str(copy), dtype="float32", device="cpu") as pool:
        assert_allclose(pool.classify([Chat(messages), *texts[1:]]).scores, wanted, atol=5 * CLOSE)
        assert_allclose(pool.classify(texts[1]).scores, wanted[1:2], atol=5 * CLOSE)
    assert np.ptp(wanted) > 1


def copied(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy
