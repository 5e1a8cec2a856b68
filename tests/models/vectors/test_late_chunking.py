"""Late chunking: vectors of chunks by the token vectors of the whole document, and characters of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.testing import assert_allclose

from staged_pool import Pool
from staged_pool.runtime.model import Model
from staged_pool.runtime.models.heads.dense import DenseHead
from staged_pool.runtime.models.specs.model import DenseSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, EmbedRequest, Image, Output, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.embed import plan
from staged_pool.stages.errors import InvalidInput, StagedPoolError, Unsupported
from staged_pool.stages.work import Parts, Prepared
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.tiny import WIDTH

CHUNKS = ["A man is eating", " food. ", "naïve café, 日本語 🙂", " and, behind it", " a statement!"]
CLOSE = 2e-5
KINDS = ["bert-mean", "xlmr-prompt", "instructor-no-prompt", "t5-mean"]


def document_vectors(folder: Path, chunks: Sequence[str], prompt: str = "", *, skips_prompt: bool = False) -> Any:
    """Pool the token vectors of sentence-transformers by the characters of each chunk, one by one."""
    model = oracle.loaded("SentenceTransformer", folder)
    whole = prompt + "".join(chunks)
    tokens = model.encode(whole, output_value="token_embeddings", prompt="", show_progress_bar=False)
    offsets = hf.PreTrainedTokenizerFast.from_pretrained(folder)(whole, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == len(tokens)
    ends = list(itertools.accumulate(map(len, chunks), initial=len(prompt)))
    places, place = [], 0
    for start, end in offsets:  # special tokens have no characters, and stay with their neighbours
        while start < end and end > ends[place + 1]:
            place += 1
        places.append(place)
    kept = [
        not skips_prompt or end > len(prompt) or (start == end and number > 0)
        for number, (start, end) in enumerate(offsets)
    ]
    rows = [
        tokens[[p == place and keep for p, keep in zip(places, kept, strict=True)]].mean(dim=0)
        for place in range(len(chunks))
    ]
    features = {"sentence_embedding": torch.stack(rows)}
    for module in list(model)[2:]:
        features = module(features)
    vectors = features["sentence_embedding"].detach().numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def request(chunks: Sequence[str | tuple[int, ...]], max_tokens: int | None = None, **settings: Any) -> EmbedRequest:
    inputs = tuple(TextInput(chunk, max_tokens=max_tokens) for chunk in chunks)
    return EmbedRequest(inputs=inputs, **{"late_chunking": True, **settings})


def run(model: Model, given: EmbedRequest, beside: Sequence[TokenSequence] = ()) -> EmbedResult:
    """Vectors of a request, whose sequences are run in one batch with others."""
    planned = plan(given, model.card)
    (outcome,) = model.preprocess(planned.inputs)
    if isinstance(outcome, StagedPoolError):
        raise outcome
    parts = (outcome,) if isinstance(outcome, Prepared) else outcome
    rows = model.forward([*beside, *(part.payload for part in parts)])[len(beside) :]
    result = planned.finish([rows[0] if isinstance(outcome, Prepared) else Parts(rows)], sum(p.tokens for p in parts))
    assert isinstance(result, EmbedResult)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_mean_of_their_tokens_in_the_document(
    kind: str, load_tiny: LoadTiny, tiny_folder: TinyFolder
) -> None:
    model = load_tiny(kind)
    prompt = {"xlmr-prompt": "query: ", "instructor-no-prompt": "Represent it: "}.get(kind, "")
    given = request(CHUNKS, prompt=prompt or None)
    wanted = document_vectors(tiny_folder(kind), CHUNKS, prompt, skips_prompt=kind == "instructor-no-prompt")
    beside = [TokenSequence([5, 6, 7], DENSE_ONLY), TokenSequence([8] * 40, DENSE_ONLY)]
    alone = run(model, given)
    assert_allclose(
        alone.embeddings,
        wanted[:, : model.card.width] / np.linalg.norm(wanted[:, : model.card.width], axis=1, keepdims=True),
        atol=CLOSE,
    )
    assert_allclose(run(model, given, beside).embeddings, alone.embeddings, atol=CLOSE)
    assert alone.usage.prompt_tokens == len(
        hf.PreTrainedTokenizerFast.from_pretrained(tiny_folder(kind))(prompt + "".join(CHUNKS)).input_ids
    )
    apart = run(model, request(CHUNKS[1:2])).embeddings
    assert np.abs(apart - alone.embeddings[1:2]).max() > 0.01


@pytest.mark.parametrize("kind", ["bert-mean", "xlmr-prompt", "instructor-no-prompt"])
def test_a_document_of_one_chunk_is_a_text(kind: str, load_tiny: LoadTiny) -> None:
    model, text = load_tiny(kind), "".join(CHUNKS)
    settings: dict[str, Any] = {"prompt": "Represent it: "} if kind == "instructor-no-prompt" else {}
    one = run(model, request([text], **settings)).embeddings
    assert_allclose(one, run(model, request([text], late_chunking=False, **settings)).embeddings, atol=1e-6)


def test_a_head_pools_chunks_beside_whole_texts() -> None:
    spec = DenseSpec(pooling=("mean", "max"), modules=(), normalize=False)
    base = hf.BertModel(hf.BertConfig(vocab_size=9, hidden_size=WIDTH, num_hidden_layers=0, num_attention_heads=4))
    head = DenseHead(spec, WIDTH, base, base)
    sequences = [
        TokenSequence([1] * 5, DENSE_ONLY, prompt_tokens=2, chunks=(3, 2)),
        TokenSequence([1] * 3, DENSE_ONLY, prompt_tokens=1),
        TokenSequence([1] * 2, DENSE_ONLY, prompt_tokens=1, chunks=(1, 1)),
    ]
    hidden = torch.randn(10, WIDTH)
    rows = head(hidden, PackedBatch.of(sequences, torch.device("cpu")))()
    spans = [[(2, 3), (3, 5)], [(6, 8)], [(8, 9), (9, 10)]]
    for row, own in zip(rows, spans, strict=True):
        wanted = np.stack([torch.cat([hidden[a:b].mean(0), hidden[a:b].max(0).values]).numpy() for a, b in own])
        assert isinstance(row, np.ndarray)
        assert_allclose(row if row.ndim == 2 else row[np.newaxis], wanted, atol=1e-6)
    assert [row.ndim for row in rows if isinstance(row, np.ndarray)] == [2, 1, 2]


def test_a_long_document_is_read_in_windows_of_whole_chunks(load_tiny: LoadTiny) -> None:
    chunks = [f" a statement number {number}, and some more words" for number in range(20)]
    whole, cut = load_tiny("bert-mean", split_long_inputs=True), load_tiny("bert-mean")
    found = run(whole, request(chunks))
    with pytest.raises(InvalidInput, match="maximum context length is 64 tokens"):
        run(cut, request(chunks))
    inputs = plan(request(chunks, late_chunking=False), cut.card).inputs
    own = [part.tokens - 2 for part in cut.preprocess(inputs) if isinstance(part, Prepared)]
    wanted, first, room = [], 0, 62
    while first < len(chunks):
        last = first + 1
        while last < len(chunks) and sum(own[first : last + 1]) <= room:
            last += 1
        wanted.append(run(cut, request(chunks[first:last])).embeddings)
        first = last
    assert len(wanted) > 2
    assert_allclose(found.embeddings, np.concatenate(wanted), atol=CLOSE)
    assert found.usage.prompt_tokens == sum(own) + 2 * len(wanted)
    with pytest.raises(InvalidInput, match="Chunk 1 of the document has 80 tokens, but only 62 fit"):
        run(whole, request(["a", " x" * 80]))


@pytest.mark.parametrize(
    ("kind", "chunks", "settings", "said"),
    [
        ("bert-mean", ["a", ""], {}, "an input must not be empty"),
        ("bert-mean", ["a", (5, 6)], {}, "each input must be a text"),
        ("bert-mean", ["a", " "], {}, "Chunk 1 of the document has no token that ends in it"),
        ("bert-mean", ["a b", " c", " d"], {"max_tokens": 5}, "Chunk 2 of the document is cut off"),
        ("bert-mean", ["a " * 99], {}, "maximum context length is 64 tokens"),
        ("bert-cls", ["a", "b"], {}, "has cls pooling, and late chunking needs the mean"),
        ("bge-m3", ["a"], {"outputs": frozenset({Output.DENSE, Output.SPARSE})}, "late_chunking is for dense vectors"),
    ],
)
def test_what_cannot_be_chunked_is_rejected(
    kind: str, chunks: Sequence[Any], settings: dict[str, Any], said: str, load_tiny: LoadTiny
) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=said):
        run(load_tiny(kind), request(chunks, **settings))


def test_an_image_is_no_chunk(load_tiny: LoadTiny) -> None:
    given = EmbedRequest(inputs=(TextInput("a"), Image(b"x")), late_chunking=True)
    with pytest.raises(InvalidInput, match="each input must be a text") as rejected:
        plan(given, load_tiny("bert-mean").card)
    assert rejected.value.index == 1


def test_the_last_chunk_may_be_cut(load_tiny: LoadTiny, tiny_folder: TinyFolder) -> None:
    model, chunks = load_tiny("bert-mean"), ["a statement", " yields " * 80]
    found = run(model, request(chunks, max_tokens=MODEL_MAX))
    assert found.usage.prompt_tokens == 64
    kept = " yields " * (
        62 - len(hf.PreTrainedTokenizerFast.from_pretrained(tiny_folder("bert-mean"))(chunks[0]).input_ids) + 2
    )
    assert_allclose(found.embeddings, run(model, request([chunks[0], kept])).embeddings, atol=CLOSE)


def test_one_call_of_a_pool_is_one_document(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("bert-mean")
    with Pool(str(folder), dtype="float32") as pool:
        assert_allclose(pool.embed(CHUNKS, late_chunking=True).embeddings, document_vectors(folder, CHUNKS), atol=CLOSE)
        with pytest.raises(InvalidInput, match="offsets are of multi_vector"):
            pool.embed(CHUNKS, offsets=True)


@pytest.mark.parametrize("kind", ["colbert-st", "colbert-hf", "bge-m3"])
@pytest.mark.parametrize("role", oracle.ROLES)
def test_token_vectors_come_with_their_characters(
    kind: str, role: oracle.Role, load_tiny: LoadTiny, tiny_folder: TinyFolder
) -> None:
    model, texts = load_tiny(kind), ["A man is eating food.", "  naïve, café"]
    own = next((name for name in model.card.prompts if name == role), None)
    inputs = (*map(TextInput, texts), TextInput((5, 6, 7)))
    given = EmbedRequest(
        inputs=inputs,
        outputs=frozenset({Output.MULTI_VECTOR}),
        offsets=True,
        prompt_name=role if kind != "bge-m3" else own,
    )
    planned = plan(given, model.card)
    payloads = [p.payload for p in model.preprocess(planned.inputs) if isinstance(p, Prepared)]
    result = planned.finish(model.forward(payloads), 0)
    assert isinstance(result, EmbedResult)
    assert result.offsets is not None
    assert result.multi_vector is not None
    assert result.offsets[2] is None
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(tiny_folder(kind))
    for text, found, vectors in zip(texts, result.offsets, result.multi_vector, strict=False):
        assert found is not None
        assert found.shape == (len(vectors), 2)
        words = [text[start:end] for start, end in found.tolist() if start < end]
        bare = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        wanted = [text[start:end] for start, end in bare["offset_mapping"]]
        dropped = kind != "bge-m3" and role == "document"
        assert words == [word for word in wanted if not dropped or word not in ".,"]
