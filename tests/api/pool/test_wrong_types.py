"""Values of wrong types: each face of the library rejects them alike, and says how to pass them."""

from __future__ import annotations

import array
import copy
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import PIL.Image
import pytest
import torch

from staged_pool.client import AsyncClient, Client
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import InvalidInput
from tests.api.pool.conftest import Open
from tests.support.cards import BOTH_LANES, CARD, CLASSIFIER, CROSS_ENCODER, TAGGER
from tests.support.model import LetterModel


class Table:
    """Stands for a table of pandas or polars, which iterates over its columns' names."""

    columns = ("text", "label")

    def __iter__(self) -> Any:
        return iter(self.columns)


SINGLE: Mapping[str, tuple[object, str]] = {
    "bytes": (b"abc", "data.decode()"),
    "bytes that may change": (bytearray(b"abc"), "data.decode()"),
    "a view of bytes": (memoryview(b"abc"), "data.decode()"),
    "a text of numpy in bytes": (np.array([b"abc"])[0], "data.decode()"),
    "a path": (Path("photo.png"), "path.read_text()"),
    "a dictionary": ({"text": "abc"}, "list(given.values())"),
    "a dictionary of both": ({"text": "abc", "image": "photo.png"}, "`Chat`, whose content is `(Image(data), text)`"),
    "a set": ({"abc"}, "sorted(given)"),
    "an image of Pillow": (PIL.Image.new("RGB", (1, 1)), "Image(path.read_bytes())"),
    "an array of numbers": (np.array([1, 2, 3]), "given.tolist()"),
    "a tensor": (torch.tensor([1, 2, 3]), "given.tolist()"),
}
"""Values that are no input, and a part of the message."""

LISTS: Mapping[str, tuple[object, str]] = {
    "texts of numpy in bytes": (np.array([b"a", b"b"]), "numpy.char.decode(given)"),
    "a table": (Table(), "table['text']"),
}
"""Values that are no list of inputs."""

EMBEDS: Mapping[str, Callable[[Any, Any], object]] = {
    "embed": lambda face, given: face.embed(given),
    "encode": lambda face, given: face.encode(given),
    "encode_query": lambda face, given: face.encode_query(given),
    "embed_stream": lambda face, given: list(face.embed_stream(given)),
}
SCORES: Mapping[str, Callable[[Any, Any], object]] = {
    "queries of score": lambda face, given: face.score(given, ["a"]),
    "documents of score": lambda face, given: face.score("a", given),
    "documents of rerank": lambda face, given: face.rerank("a", given),
    "documents of rank": lambda face, given: face.rank("a", given),
    "pairs of predict": lambda face, given: face.predict(given),
    "pairs of score_stream": lambda face, given: list(face.score_stream(given)),
}
LABELS: Mapping[str, Callable[[Any, Any], object]] = {
    "classify": lambda face, given: face.classify(given),
    "classify_stream": lambda face, given: list(face.classify_stream(given)),
}
CARDS = {"embed": CARD, "score": CROSS_ENCODER, "classify": CLASSIFIER, "tokens": TAGGER}
CALLS: Mapping[str, tuple[str, Callable[[Any, Any], object]]] = {
    **{name: ("embed", call) for name, call in EMBEDS.items()},
    **{name: ("score", call) for name, call in SCORES.items()},
    **{name: ("classify", call) for name, call in LABELS.items()},
    "classify_tokens": ("tokens", lambda face, given: face.classify_tokens(given)),
}


def wrong(value: object) -> object:
    """A value of its own for a test: an iterator is used up by the first."""
    return copy.copy(value) if not isinstance(value, memoryview) else value


def rejects(call: Callable[[Any, Any], object], face: object, given: object, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        call(face, given)
    assert words in str(caught.value), str(caught.value)
    assert caught.value.param is not None


@pytest.mark.parametrize("name", CALLS)
def test_a_pool_rejects_a_wrong_type_and_says_how_to_pass_it(name: str, letters: Open) -> None:
    kind, call = CALLS[name]
    pool = letters(LetterModel(CARDS[kind]))
    for value, words in {**SINGLE, **LISTS}.values():
        rejects(call, pool, wrong(value), words)
    for value, words in SINGLE.values():
        pairs = "pairs" in name
        rejects(call, pool, [("a", "b"), ("a", value)] if pairs else ["a", value], words)


@pytest.mark.parametrize("name", [name for name in CALLS if "stream" not in name])
def test_an_engine_rejects_what_a_pool_rejects(name: str, letters: Open) -> None:
    kind, call = CALLS[name]
    pool = letters(LetterModel(CARDS[kind]))

    def in_engine(_: object, given: object) -> object:
        return pool.call(lambda engine: call(engine, given))  # type: ignore[arg-type,return-value]

    for value, words in {**SINGLE, **LISTS}.values():
        rejects(in_engine, None, wrong(value), words)


CLIENT_CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "embed": lambda face, given: face.embed(given),
    "classify": lambda face, given: face.classify(given),
    "classify_tokens": lambda face, given: face.classify_tokens(given),
    "queries of score": lambda face, given: face.score(given, ["a"]),
    "documents of score": lambda face, given: face.score("a", given),
    "documents of rerank": lambda face, given: face.rerank("a", given),
}


@pytest.mark.parametrize("name", CLIENT_CALLS)
def test_a_client_rejects_them_before_it_asks_the_server(name: str) -> None:
    call = CLIENT_CALLS[name]

    async def ask(given: object) -> None:
        async with AsyncClient() as client:
            await call(client, given)  # type: ignore[misc]

    with Client() as client:
        for value, words in {**SINGLE, **LISTS}.values():
            rejects(call, client, wrong(value), words)
            rejects(lambda _, given: anyio.run(ask, given), None, wrong(value), words)


@pytest.mark.parametrize("name", ["embed", "embed_stream", "classify", "documents of score", "classify_tokens"])
def test_lines_of_a_binary_file_are_rejected(name: str, letters: Open) -> None:
    kind, call = CALLS[name]
    rejects(call, letters(LetterModel(CARDS[kind])), io.BytesIO(b"a\nb\n"), "data.decode()")


def test_labels_are_rejected_by_their_type(letters: Open) -> None:
    pool = letters(LetterModel(CLASSIFIER))
    for value, words in (({"a": 1}, "list("), ({"a", "b"}, "sorted("), (["a", b"b"], "decode()"), (b"a", "decode()")):
        rejects(lambda face, given: face.classify("a", candidate_labels=given), pool, value, words)


@pytest.mark.parametrize("given", [b"abc", bytearray(b"abc"), "abc", {1: 2}, {1, 2}, np.array([1, 2]), [True], None])
def test_token_ids_are_a_list_of_ints(given: Any, letters: Open) -> None:
    pool = letters()
    rejects(lambda face, ids: face.detokenize(ids), pool, given, "list of token ids")
    with Client() as client:
        rejects(lambda face, ids: face.detokenize(ids), client, given, "list of token ids")


@pytest.mark.parametrize("given", [b"abc", Path("a.txt"), ["a"], None])
def test_one_text_or_conversation_is_tokenized(given: Any, letters: Open) -> None:
    rejects(lambda face, source: face.tokenize(source), letters(), given, "must be a text")
    with Client() as client:
        rejects(lambda face, source: face.tokenize(source), client, given, "must be a text")


@pytest.mark.parametrize("given", ["ab", {"a": 1, "b": 2}, {"a", "b"}, b"ab", ("a", "b", "c"), ("a",)])
def test_a_pair_is_a_tuple_or_list_of_two(given: Any, letters: Open) -> None:
    pool = letters(LetterModel(CROSS_ENCODER))
    rejects(lambda face, pairs: list(face.score_stream(pairs)), pool, [given], "must be a pair")


@pytest.mark.parametrize("form", [list, tuple, iter, np.array, lambda texts: dict.fromkeys(texts).keys()])
def test_lists_of_texts_of_any_other_form_are_served(form: Callable[[list[str]], Iterable[str]], letters: Open) -> None:
    texts = ["ab", "b", "cab"]
    pool = letters()
    wanted = pool.embed(texts).embeddings
    np.testing.assert_array_equal(pool.embed(form(texts)).embeddings, wanted)


def test_token_ids_may_be_an_array_of_the_standard_library(letters: Open) -> None:
    pool = letters()
    ids = array.array("I", [97, 98])
    np.testing.assert_array_equal(pool.embed([ids]).embeddings, pool.embed([[97, 98]]).embeddings)


@pytest.mark.parametrize("name", ["max_seq_length", "truncate_dim", "prompts", "unheard_of"])
def test_an_attribute_that_a_pool_lacks_cannot_be_set(name: str, letters: Open) -> None:
    pool = letters()
    for face in (pool, pool.call(_itself), Client()):
        with pytest.raises(AttributeError, match=name):
            setattr(face, name, 16)
        with pytest.raises(AttributeError, match=name):
            getattr(face, name)


def test_an_error_of_an_attribute_says_what_takes_its_place(letters: Open) -> None:
    pool: Any = letters()
    with pytest.raises(AttributeError, match=r"instead: card\.max_tokens, and the argument max_tokens of embed"):
        pool.max_seq_length = 16
    with pytest.raises(AttributeError, match="did you mean 'encode'"):
        pool.encod("a")
    client: Any = Client()
    with pytest.raises(AttributeError, match="settings are arguments of the client"):
        client.timeout_s = 3


@pytest.mark.parametrize(
    "text", ["photo.png", "data:image/png;base64,AAAA", "https://example.com/a%20b.JPG?size=3", "clip.mp4"]
)
def test_a_text_that_names_an_image_is_not_read_as_letters(
    text: str, letters: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photo.png", "clip.mp4"):
        Path(name).write_bytes(b"file")
    both = replace(BOTH_LANES, reads_videos=True)
    with pytest.raises(InvalidInput, match="pass the file as"):
        letters(LetterModel(both)).encode([text])
    assert letters().encode([text]).shape[0] == 1  # a model of texts alone reads it, as sentence-transformers does
    with pytest.raises(InvalidInput, match=r"path\.read_bytes\(\)"):
        letters(LetterModel(both)).embed([Image(Path("photo.png"))])  # type: ignore[arg-type]


async def _itself(engine: Any) -> Any:
    return engine


def test_an_address_with_the_version_of_openai_is_the_servers() -> None:
    for address in ("http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/", "http://127.0.0.1:9/pool/v1"):
        with Client(address) as client:
            assert not client._settings.base_url.rstrip("/").endswith("/v1")
