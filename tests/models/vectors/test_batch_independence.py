"""A text's vector does not depend on its batch, earlier batches or a pause.

The right vector is that of transformers for the text alone, in a model that has not run before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray

from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.model import Model
from staged_pool.runtime.models.kernels.module_state import ModuleState
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.stages.errors import ConfigError
from tests.models.tiny import byte_bpe, pooling_flags, save_body, word_piece, write_json, write_modules
from tests.models.transformer.test_architectures import ARCHITECTURES, POSITIONS, SEES_PADDING
from tests.needed import needs

Vectors = NDArray[np.float32]
Settings = dict[str, Any]

SHORT_LIMIT = 32
"""Tokens up to which `dynamic` and `longrope` use a short text's frequencies in these models."""
LONGEST = 120
LENGTHS = (3, 10, 31, 32, 33, 34, 50, 64, 90, 120, 10, 33)
"""On both sides of the limit, with neighbours of equal length."""

CLOSE = 1e-5
ROUGH = {"FNet": 1e-4, "GPT2": 1e-4}
"""Architectures whose random weights amplify rounding."""

_BASE: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_DECODER = _BASE | {"num_key_value_heads": 2, "head_dim": 8}
_SHORT_FACTORS = [1.0, 1.1, 1.3, 1.6]
_LONG_FACTORS = [2.0, 3.0, 5.0, 9.0]


def rope(kind: str, **others: Any) -> Settings:
    """Settings of a rope type, whose limit is `SHORT_LIMIT`."""
    own: dict[str, Settings] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": SHORT_LIMIT},
        "longrope": {
            "short_factor": _SHORT_FACTORS,
            "long_factor": _LONG_FACTORS,
            "factor": 4.0,
            "original_max_position_embeddings": SHORT_LIMIT,
        },
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": SHORT_LIMIT,
        },
    }
    return {"rope_type": kind, "rope_theta": 10000.0, **own[kind], **others}


def limited(kind: str, **others: Any) -> Settings:
    """The same, with the limit where each type looks for it."""
    limit = SHORT_LIMIT if kind == "dynamic" else 128
    return {"rope_parameters": rope(kind, **others), "max_position_embeddings": limit}


class Kind(NamedTuple):
    config: str
    """Its name in transformers, without `Config`."""
    settings: Settings
    tokenizer: Callable[[], Any] = byte_bpe
    attention: str = "packed"
    max_tokens: int = LONGEST


def _layers(kind: str) -> Settings:
    """Rope by the type of a layer, as ModernBERT and Gemma 3 have it."""
    types = {"full_attention": rope(kind), "sliding_attention": rope("default", rope_theta=100.0)}
    return {"rope_parameters": types, "max_position_embeddings": SHORT_LIMIT if kind == "dynamic" else 128}


_MODERN = _BASE | {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2}
_GEMMA3 = _DECODER | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
_PHI3 = _BASE | {"num_key_value_heads": 2, "original_max_position_embeddings": SHORT_LIMIT}
_PHIMOE = _DECODER | {"num_local_experts": 2, "sliding_window": None}

KINDS: dict[str, Kind] = {
    **{f"Llama-{kind}": Kind("Llama", _DECODER | limited(kind)) for kind in
       ("default", "linear", "dynamic", "yarn", "longrope", "llama3")},
    "Phi3-longrope": Kind("Phi3", _PHI3 | limited("longrope")),
    "Phi3-partial": Kind(
        "Phi3",
        _PHI3
        | limited("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[3.0, 6.0]),
    ),
    "Phi-dynamic-partial": Kind("Phi", _BASE | limited("dynamic", partial_rotary_factor=0.5)),
    "Phimoe": Kind("Phimoe", _PHIMOE | limited("longrope", short_mscale=1.1, long_mscale=1.4)),
    "Qwen3-dynamic": Kind("Qwen3", _DECODER | limited("dynamic")),
    "Qwen3-yarn": Kind("Qwen3", _DECODER | limited("yarn")),
    "Mistral-longrope": Kind("Mistral", _DECODER | limited("longrope") | {"sliding_window": 16}),
    "ModernBert-dynamic": Kind("ModernBert", _MODERN | _layers("dynamic")),
    "ModernBert-longrope": Kind("ModernBert", _MODERN | _layers("longrope")),
    "Gemma3Text-dynamic": Kind("Gemma3Text", _GEMMA3 | _layers("dynamic")),
    "EuroBert-dynamic": Kind("EuroBert", _DECODER | limited("dynamic")),
    "NomicBert-dynamic": Kind("NomicBert", _BASE | limited("dynamic")),
    "Gte-dynamic": Kind("Gte", _BASE | limited("dynamic")),
    "JinaEmbeddingsV3-dynamic": Kind("JinaEmbeddingsV3", _BASE | limited("dynamic")),
    "Gemma2-dynamic": Kind(
        "Gemma2", _DECODER | limited("dynamic") | {"query_pre_attn_scalar": 8, "sliding_window": 16}, attention="padded"
    ),
    "BigBird": Kind(
        "BigBird",
        _BASE | {"max_position_embeddings": 256, "attention_type": "block_sparse", "block_size": 4,
                 "num_random_blocks": 1},
        attention="padded",
    ),
    "FNet": Kind("FNet", _BASE | {"max_position_embeddings": 256}, attention="padded"),
    "XLNet": Kind("XLNet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "pad_token_id": 1},
                  attention="padded"),
    "Esm": Kind(  # it scales a whole row by the number of mask tokens in it
        "Esm",
        _BASE | {"max_position_embeddings": 256, "position_embedding_type": "rotary", "mask_token_id": 5,
                 "token_dropout": True},
        attention="padded",
    ),
    **{name: Kind(name, settings, tokenizer, attention, POSITIONS)
       for name, (settings, tokenizer, attention) in ARCHITECTURES.items()},
    **{name: Kind(name, settings, word_piece, "padded", POSITIONS) for name, settings in SEES_PADDING.items()},
}  # fmt: skip
"""Rope types with frequencies by length, and architectures with state or with batch-wide values."""

SINCE = {
    "Gte-dynamic": "5.18",
    "ModernBert-longrope": "5.21",  # older ones fail on the second long text
    "NomicBert-dynamic": "5.5",
}
"""The first transformers that has the class, or that can be the oracle for it."""

REFUSED: dict[str, tuple[Settings, str]] = {
    "Funnel": (
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], "num_decoder_layers": 1},
        "fails on a few tokens",
    ),
    "Nystromformer": (_BASE | {"num_landmarks": 8, "segment_means_seq_len": 16}, "fails on a few tokens"),
    "SwitchTransformers": ({"d_model": 32, "num_layers": 2, "num_heads": 4}, "has no encoder"),
}
"""Architectures without free text input, or with experts of a fixed capacity in a batch."""


def model_of(kind: Kind, tokenizer: Any) -> Any:
    torch.manual_seed(7)
    config = getattr(hf, f"{kind.config}Config")(vocab_size=len(tokenizer), **kind.settings)
    encoder = getattr(hf, f"{kind.config}EncoderModel", None)
    return (encoder or getattr(hf, f"{kind.config}Model"))(config).eval()


def build(kind: Kind, folder: Path) -> tuple[Path, Any]:
    """A folder, and the model in it, which has not run yet."""
    tokenizer = kind.tokenizer()
    model = model_of(kind, tokenizer)
    save_body(folder, model, tokenizer, model_max_length=kind.max_tokens)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": kind.max_tokens})
    return folder, model


def texts(vocabulary: int, lengths: Sequence[int]) -> list[TokenSequence]:
    random = np.random.default_rng(3)
    return [TokenSequence(random.integers(6, vocabulary, size=length).tolist(), DENSE_ONLY) for length in lengths]


def right(model: Any, sequence: TokenSequence) -> Vectors:
    """The mean of the token vectors, from a model that has not run before."""
    fresh = copy.deepcopy(model)
    fresh.set_experts_implementation("eager")  # which every torch can compute
    ids = torch.tensor([sequence.ids])
    with torch.inference_mode():
        # Older versions of Jina's class have no types for a text that is longer than the config says.
        types = {"token_type_ids": torch.zeros_like(ids)} if isinstance(fresh, hf.JinaEmbeddingsV3Model) else {}
        hidden = fresh(input_ids=ids, attention_mask=torch.ones_like(ids), **types)[0][0]
    vector: Vectors = hidden.mean(dim=0).numpy()
    return vector


def embedded(model: Model, sequences: Sequence[TokenSequence]) -> Vectors:
    rows = model.forward(sequences)
    return np.stack([np.asarray(row.values[Output.DENSE]) for row in rows if isinstance(row, Row)])


def far(found: Vectors, wanted: Vectors) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs("transformers", SINCE[n], f"the class of {n}") if n in SINCE else ()) for n in KINDS],
)
def test_a_vector_depends_on_no_other_text(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    folder, fresh = build(kind, tmp_path / "model")
    attentions: tuple[Attention, ...] = ("auto", "padded") if kind.attention == "packed" else ("auto",)
    models = [
        load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention, torch_threads=1))
        for attention in attentions
    ]
    card = models[0].card
    sequences = texts(card.vocabulary, [min(length, card.max_tokens) for length in LENGTHS])
    wanted = np.stack([right(fresh, sequence) for sequence in sequences])
    most = ROUGH.get(name, CLOSE)
    for attention, model in zip(attentions, models, strict=True):
        assert model.card.attention == (kind.attention if attention == "auto" else "padded")
        together = embedded(model, sequences)
        assert far(together, wanted) <= most, "beside others"
        alone = [embedded(model, [sequence])[0] for sequence in sequences]
        assert far(np.stack(alone), wanted) <= most, "alone, after others"
        longest = sequences[LENGTHS.index(LONGEST)]
        for place in (0, 4):
            embedded(model, [longest])
            assert far(embedded(model, [sequences[place]])[0], wanted[place]) <= most, "after a longer one"
            beside = embedded(model, [sequences[place], longest])
            assert far(beside, wanted[[place, LENGTHS.index(LONGEST)]]) <= most, "beside a longer one"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_for_texts_of_any_length_is_rejected(name: str, tmp_path: Path) -> None:
    settings, why = REFUSED[name]
    folder, _ = build(Kind(name, settings), tmp_path / "model")
    with pytest.raises(ConfigError, match=why):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_frequencies_that_depend_on_a_length_in_an_unknown_way_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = build(KINDS["Llama-dynamic"], tmp_path / "model")

    def forward(self: Any, x: Any, seconds: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(hf.models.llama.modeling_llama.LlamaRotaryEmbedding, "forward", forward)
    with pytest.raises(ConfigError, match="rope_type='dynamic' depends on the length of a text, and LlamaRotary"):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_what_forwards_change_is_brought_back(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    folder, _ = build(KINDS["BigBird"], tmp_path / "model")
    load_model(EngineConfig(model=str(folder), dtype="float32"))
    (reason,) = [event["reason"] for event in logged if event["event"] == "model.peculiar"]
    assert reason.startswith("forwards change ")
    assert "BigBirdEncoder.attention_type" in reason


def test_forwards_at_once_have_the_frequencies_of_their_own_texts(tmp_path: Path) -> None:
    folder, fresh = build(KINDS["Llama-dynamic"], tmp_path / "model")
    model = load_model(EngineConfig(model=str(folder), dtype="float32", torch_threads=1))
    sequences = texts(model.card.vocabulary, [10, 120, 20, 50])
    wanted = [right(fresh, sequence) for sequence in sequences]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda place: embedded(model, [sequences[place]])[0], [0, 1, 2, 3] * 25)]
    assert max(far(vector, wanted[place % 4]) for place, vector in enumerate(found)) <= CLOSE


def test_the_state_of_a_module_is_compared_and_brought_back() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest = 0
            self.seen: list[int] = []
            self.part: torch.nn.Module = torch.nn.Identity()
            self.table: torch.Tensor
            self.register_buffer("table", torch.zeros(2))
            self.weight = torch.nn.Parameter(torch.ones(2))

    counter = Counter()
    state = ModuleState(torch.nn.ModuleList([counter]))
    before = (counter.longest, counter.part, counter.table)
    assert state.changes() == []
    counter.longest = 7
    counter.seen.append(1)
    counter.part = torch.nn.Dropout()
    counter.table += 1
    counter.register_buffer("more", torch.ones(1))
    names = ("longest", "more", "part", "seen", "table")
    assert state.changes() == [f"Counter.{name}" for name in names]
    state.restore()
    assert state.changes() == []
    assert (counter.longest, counter.part, counter.table) == before
    assert counter.table.tolist() == [0, 0]
    assert counter.seen == []
    assert not hasattr(counter, "more")
    assert not state.weights_changed()
    with torch.no_grad():
        counter.weight.mul_(2)
    assert state.weights_changed()


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "ntk", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_a_rope_type_that_is_not_known_is_named(said: Settings, tmp_path: Path) -> None:
    folder, _ = build(Kind("Llama", _DECODER | limited("default")), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(ConfigError, match=r"config\.json: rope_type='ntk' is not known to transformers for .*'llama'"):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
