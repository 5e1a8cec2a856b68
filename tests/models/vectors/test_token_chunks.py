"""Late chunking by runs of tokens: the mean of each run, then the head, then length 1, as transformers computes it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.torch import load_file, save_file
from torch import Tensor

from staged_pool import Pool
from staged_pool.runtime.config import Attention, DType, EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import MODEL_MAX, Chat, EmbedRequest, Image, Output, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.token_chunks import CHUNKED
from staged_pool.stages.errors import InvalidInput, Unsupported
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.oracle import Array
from tests.models.requests import embed, sequences
from tests.models.tiny import build, edit_json
from tests.models.tiny.multi_vector import DIMENSIONS
from tests.servers.fronts import fronts_on

TEXTS = [
    "A man is eating food.",
    "naïve café, 日本語 🙂, and (behind it) a statement!",
    "short",
    "A function call with many arguments, and one more. " * 3,
]
CLOSE: dict[str, float] = {"float32": 2e-5, "bfloat16": 2e-2}
KINDS = ["colbert-pylate", "colbert-tanh", "colbert-hf", "colbert-st", "bge-m3", "bert-mean", "qwen3-last"]
PREFIXES = {"colbert-st": "passage: "}
MARKERS = {"colbert-pylate": "[D] ", "colbert-tanh": "[D] ", "colbert-hf": "[unused1]"}


def with_activation(folder: Path) -> Path:
    """Give a folder of PyLate a projection that does not commute with the mean."""
    shutil.copytree(folder, folder.parent / "tanh")
    dense = folder.parent / "tanh" / "1_Dense"
    edit_json(dense / "config.json", bias=True, activation_function="torch.nn.modules.activation.Tanh")
    torch.manual_seed(3)
    weights = load_file(dense / "model.safetensors")
    save_file({"linear.weight": weights["linear.weight"], "linear.bias": torch.randn(DIMENSIONS)}, dense / "model")
    (dense / "model").replace(dense / "model.safetensors")
    return folder.parent / "tanh"


@pytest.fixture(scope="session")
def folder_of(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind != "colbert-tanh":
            return tiny_folder(kind)
        if kind not in made:
            made[kind] = with_activation(build("colbert-pylate", tmp_path_factory.mktemp("chunks") / "plain"))
        return made[kind]

    return folder


def projected(folder: Path, kind: str, rows: Tensor) -> Tensor:
    """The head of a kind of model, on rows of float32."""
    if kind == "bge-m3":
        state = torch.load(folder / "colbert_linear.pt", weights_only=True)
        return torch.nn.functional.linear(rows, state["weight"].float(), state["bias"].float())
    if kind == "colbert-hf":
        return rows @ load_file(folder / "model.safetensors")["linear.weight"].float().T
    if not kind.startswith("colbert"):
        return rows
    state = load_file(folder / "1_Dense" / "model.safetensors")
    found = torch.nn.functional.linear(rows, state["linear.weight"].float(), state.get("linear.bias"))
    return found.tanh() if kind == "colbert-tanh" else found


class Oracle:
    """A folder's model by transformers: one text at a time, by the characters that its own tokenizer tells."""

    def __init__(self, folder: Path, kind: str, dtype: str = "float32") -> None:
        self.folder, self.kind = folder, kind
        self.tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = hf.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def read(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters of each in the text; a prefix and special tokens have none."""
        before = PREFIXES.get(self.kind, "")
        found = self.tokenizer(before + text, return_offsets_mapping=True)
        ids, pairs = list(found["input_ids"]), list(found["offset_mapping"])
        offsets = [(max(a - len(before), 0), b - len(before)) if b > len(before) else (0, 0) for a, b in pairs]
        if self.kind in MARKERS:
            ids.insert(1, self.tokenizer.convert_tokens_to_ids(MARKERS[self.kind]))
            offsets.insert(1, (0, 0))
        return ids, offsets

    def hidden(self, text: str) -> Tensor:
        ids = torch.tensor([self.read(text)[0]])
        with torch.inference_mode():
            hidden: Tensor = self.model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].float()
        return hidden

    def vectors(self, text: str, size: int, *, normalize: bool = True) -> Array:
        means = torch.stack([part.mean(dim=0) for part in torch.split(self.hidden(text), size)])
        rows = projected(self.folder, self.kind, means)
        found: Array = (torch.nn.functional.normalize(rows, dim=-1) if normalize else rows).numpy()
        return found


def chunked(model: Encoder, texts: Sequence[str], size: int, **others: Any) -> EmbedResult:
    return embed(model, texts, Output.MULTI_VECTOR, max_tokens=None, chunk_tokens=size, **others)


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_means_behind_the_head(
    kind: str, dtype: DType, attention: Attention, folder_of: TinyFolder, load_tiny: LoadTiny
) -> None:
    folder = folder_of(kind)
    model = (
        load_model(EngineConfig(model=str(folder), dtype=dtype, attention=attention))
        if kind == "colbert-tanh"
        else load_tiny(kind, dtype=dtype, attention=attention)
    )
    assert model.card.attention == attention
    oracle = Oracle(folder, kind, dtype)
    for size in (1, 3, 1000):
        found = chunked(model, TEXTS, size)
        alone = chunked(model, TEXTS, size, alone=True)
        raw = chunked(model, TEXTS, size, normalize=False)
        assert found.multi_vector is not None
        assert alone.multi_vector is not None
        assert raw.multi_vector is not None
        for place, text in enumerate(TEXTS):
            wanted, plain = oracle.vectors(text, size), oracle.vectors(text, size, normalize=False)
            assert_allclose(found.multi_vector[place], wanted, atol=CLOSE[dtype])
            assert_allclose(alone.multi_vector[place], wanted, atol=CLOSE[dtype])
            assert_allclose(raw.multi_vector[place], plain, atol=3 * CLOSE[dtype] * max(1, np.abs(plain).max()))
    assert found.usage.prompt_tokens == sum(len(oracle.read(text)[0]) for text in TEXTS)


def test_the_mean_of_projected_vectors_would_be_another(folder_of: TinyFolder, load_tiny: LoadTiny) -> None:
    """The order shows only where the head has an activation."""
    for kind, differs in (("colbert-tanh", True), ("bge-m3", False)):
        oracle, text = Oracle(folder_of(kind), kind), TEXTS[3]
        each = projected(oracle.folder, kind, oracle.hidden(text))
        late = torch.nn.functional.normalize(
            torch.stack([part.mean(dim=0) for part in torch.split(each, 5)]), dim=-1
        ).numpy()
        assert (np.abs(late - oracle.vectors(text, 5)).max() > 0.01) == differs


@pytest.mark.parametrize("kind", ["colbert-pylate", "colbert-hf", "colbert-st", "bge-m3", "bert-mean"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_ranges_are_those_of_the_tokenizer(kind: str, size: int, folder_of: TinyFolder, load_tiny: LoadTiny) -> None:
    oracle, found = Oracle(folder_of(kind), kind), chunked(load_tiny(kind), TEXTS, size)
    assert found.chunks is not None
    assert found.offsets is not None
    for text, tokens, characters in zip(TEXTS, found.chunks, found.offsets, strict=True):
        assert characters is not None
        ids, offsets = oracle.read(text)
        starts = range(0, len(ids), size)
        assert tokens.tolist() == [[start, min(start + size, len(ids))] for start in starts]
        own = [[pair for pair in offsets[start : start + size] if pair[0] < pair[1]] for start in starts]
        wanted = [[min(a for a, _ in pairs), max(b for _, b in pairs)] if pairs else [0, 0] for pairs in own]
        assert characters.tolist() == wanted


def test_whole_token_vectors_beside_chunks_are_as_without_them(load_tiny: LoadTiny) -> None:
    """A batch may have both. The tokens that an ordinary document drops are dropped there alone."""
    model = load_tiny("colbert-st")
    plain = EmbedRequest(inputs=(TextInput(TEXTS[1]),), outputs=CHUNKED)
    (ordinary,) = sequences(model, plain)
    (in_chunks,) = sequences(model, EmbedRequest(inputs=(TextInput(TEXTS[1]),), outputs=CHUNKED, chunk_tokens=4))
    assert ordinary.kept is not None
    assert in_chunks.kept is None
    together = model.forward([in_chunks, ordinary, in_chunks])
    apart = model.forward([ordinary, ordinary, ordinary])
    first, middle, last = (row.values[Output.MULTI_VECTOR] for row in together if isinstance(row, Row))
    assert isinstance(apart[1], Row)
    assert_allclose(middle, apart[1].values[Output.MULTI_VECTOR], atol=1e-5)  # type: ignore[arg-type]
    assert isinstance(middle, np.ndarray)
    assert isinstance(first, np.ndarray)
    assert isinstance(last, np.ndarray)
    assert_array_equal(first, last)
    assert middle.shape == (len(ordinary.kept), DIMENSIONS)
    assert first.shape == (-(-len(in_chunks.ids) // 4), DIMENSIONS)


def test_a_text_beyond_the_limit_is_rejected_and_never_cut(load_tiny: LoadTiny) -> None:
    """A role of ColBERT cuts its inputs without being asked to."""
    for kind in ("colbert-pylate", "bge-m3"):
        model = load_tiny(kind)
        with pytest.raises(InvalidInput, match="maximum context length"):
            chunked(model, ["a function " * 200], 8)


@pytest.mark.parametrize(
    ("kind", "inputs", "settings", "said"),
    [
        ("bge-m3", (TextInput("a"), TextInput("")), {}, "requires nonempty plain-text input"),
        ("bge-m3", (TextInput("a"), TextInput((5, 6))), {}, "requires nonempty plain-text input"),
        ("bge-m3", (TextInput("a"), TextInput(Chat(({"role": "user", "content": "a"},)))), {}, "plain-text input"),
        ("bge-m3", (TextInput("a"), Image(b"x")), {}, "requires nonempty plain-text input"),
        ("bge-m3", (TextInput("a"), TextInput("a", max_tokens=5)), {}, "does not support input padding, truncation"),
        ("bge-m3", (TextInput("a"), TextInput("a", max_tokens=MODEL_MAX)), {}, "padding, truncation"),
        ("bge-m3", (TextInput("a"),), {"dimensions": 8}, "Late chunking does not support dimensions"),
        ("bge-m3", (TextInput("a"),), {"offsets": True}, "Leave offsets out"),
        ("bge-m3", (TextInput("a"),), {"late_chunking": True}, "give one of them"),
        ("bge-m3", (TextInput("a"),), {"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ("bge-m3", (TextInput("a"),), {"outputs": frozenset({Output.DENSE})}, "outputs must be multi_vector"),
        ("ce-bert-1label", (TextInput("a"),), {}, "Late chunking requires token_embed"),
        ("colbert-pylate", (TextInput("a"),), {"prompt_name": "query"}, "does not support input padding"),
    ],
)
def test_what_cannot_be_chunked_is_rejected(
    kind: str, inputs: tuple[Any, ...], settings: dict[str, Any], said: str, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind)
    request = EmbedRequest(inputs=inputs, **{"outputs": CHUNKED, "chunk_tokens": 2, **settings})
    with pytest.raises((InvalidInput, Unsupported)) as rejected:
        sequences(model, request)
    assert said in str(rejected.value).replace("$", "")
    assert getattr(rejected.value, "index", None) == (1 if len(inputs) > 1 else None)


def test_one_keyword_of_a_pool(tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    wanted = chunked(load_tiny("colbert-hf"), TEXTS, 4)
    with Pool(str(tiny_folder("colbert-hf")), dtype="float32") as pool:
        found = pool.embed(iter(TEXTS), outputs="multi_vector", chunk_tokens=4)
        for name in ("multi_vector", "chunks", "offsets"):
            for own, right in zip(getattr(found, name), getattr(wanted, name), strict=True):
                assert_allclose(own, right, atol=2e-5)
        whole = pool.embed(TEXTS, outputs="multi_vector")
        assert whole.chunks is None
        with pytest.raises(InvalidInput, match="chunk_tokens must be an int"):
            pool.embed(TEXTS, outputs="multi_vector", chunk_tokens=True)


@pytest.fixture(scope="session")
def colbert(load_tiny: LoadTiny) -> Encoder:
    """A model that is loaded before any event loop runs."""
    return load_tiny("colbert-hf")


@pytest.mark.anyio
async def test_a_front_carries_chunks_to_the_engine_process_and_back(colbert: Encoder) -> None:
    wanted = chunked(colbert, TEXTS, 4)
    async with fronts_on(colbert) as (engines, _, _, _):
        for _ in range(2):  # the second time by the cached rows
            found = await engines[0].embed(TEXTS, outputs="multi_vector", chunk_tokens=4)
            for name in ("multi_vector", "chunks", "offsets"):
                for own, right in zip(getattr(found, name), getattr(wanted, name), strict=True):
                    assert_allclose(own, right, atol=2e-5)
        other = await engines[0].embed(TEXTS, outputs="multi_vector", chunk_tokens=5)
        assert other.multi_vector is not None
        assert [len(rows) for rows in other.multi_vector] != [len(rows) for rows in wanted.multi_vector or ()]
