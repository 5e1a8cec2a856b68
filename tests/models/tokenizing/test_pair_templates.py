"""Pairs of which a template makes one text, against sentence-transformers' CrossEncoder."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import MODEL_MAX, PairInput
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, WORDS, load, read, reader, rejection, some_text
from tests.models.tiny.classify import RERANKER_TEMPLATE

KIND = "ce-qwen3-lm"
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
FIELDS = (
    "<|im_start|>system\nJudge {whether} it meets.<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
STRUCTURED = RERANKER_TEMPLATE.replace('map(attribute="content") | first', 'map(attribute="content.0.text") | first')


@pytest.fixture(scope="module")
def cross_encoder(tiny_folder: TinyFolder) -> Any:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sentence_transformers.CrossEncoder(str(tiny_folder(KIND)), device="cpu")


def ours(tiny_folder: TinyFolder, template: PairTemplate, **settings: Any) -> TextTokenizer:
    source, _ = load(KIND, tiny_folder)
    return reader(source, **{"chat_template": source.chat_template, "pair_template": template, **settings})


def wanted(cross_encoder: Any, query: str, document: str, prompt: str | None = None, **settings: Any) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = cross_encoder.preprocess([(query, document)], prompt=prompt, **settings)
    ids: list[int] = features["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("instruction", [None, "Find {query} what <|im_end|> is meant"])
def test_a_chat_template_is_given_what_sentence_transformers_gives_it(
    instruction: str | None, cross_encoder: Any, tiny_folder: TinyFolder
) -> None:
    tokenizer = ours(tiny_folder, PairTemplate(), max_tokens=512)
    preset = ours(tiny_folder, PairTemplate(instruction=instruction), max_tokens=512)
    chance = random.Random(8)
    texts = [some_text(chance, 20) for _ in range(20)] + STRANGE
    for query, document in zip(texts, reversed(texts), strict=True):
        ids = wanted(cross_encoder, query, document, instruction)
        pair = PairInput(first=query, second=document, max_tokens=MODEL_MAX)
        assert read(tokenizer, replace(pair, instruction=instruction)).ids == ids
        assert read(tokenizer, pair, prompt=instruction or "").ids == ids
        assert read(preset, pair).ids == ids


def test_what_is_too_long_is_cut_as_sentence_transformers_cuts_it(cross_encoder: Any, tiny_folder: TinyFolder) -> None:
    tokenizer = ours(tiny_folder, PairTemplate())
    query, document = "what is a loop", " ".join(WORDS[:600])
    for limit in (200, 201, 256, 300, 512):
        processing = {"chat_template": {"truncation": True, "max_length": limit}}
        ids = wanted(cross_encoder, query, document, processing_kwargs=processing)
        assert len(ids) == limit
        assert read(tokenizer, PairInput(first=query, second=document, max_tokens=limit)).ids == ids


@pytest.mark.parametrize("template", [PairTemplate(), PairTemplate(text=FIELDS, instruction=DEFAULT)])
def test_only_the_end_of_the_document_is_dropped(template: PairTemplate, tiny_folder: TinyFolder) -> None:
    tokenizer = ours(tiny_folder, template)
    _, theirs = load(KIND, tiny_folder)
    after = len(theirs("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")["input_ids"])
    before = len(read(tokenizer, PairInput(first="a query", second="")).ids) - after
    for document in (" ".join(WORDS[:200]), "日本語 🙂 " * 60, "x" * 300, "same " * 100 + "\n \n"):
        whole = read(tokenizer, PairInput(first="a query", second=document)).ids
        for limit in (len(whole) + 1, len(whole), len(whole) - 1, 300, before + after + 9, before + after):
            ids = read(tokenizer, PairInput(first="a query", second=document, max_tokens=limit)).ids
            assert ids == (whole if limit >= len(whole) else whole[: limit - after] + whole[-after:])
        nothing = PairInput(first="a query", second=document, max_tokens=before + after - 2)
        assert "more than the limit" in str(rejection(tokenizer, nothing))


@pytest.mark.parametrize("template", [PairTemplate(), PairTemplate(text=FIELDS, instruction=DEFAULT)])
def test_the_middle_of_a_document_that_is_far_too_long_need_not_be_tokenized(
    template: PairTemplate, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ours(tiny_folder, template)
    chance = random.Random(5)
    ends = ["", "\n", " \n\n", "\n \n", " <", "don't", " <|im_end|>", "  two blanks", "日本語 🙂"]
    documents = [" ".join(chance.choices(WORDS + STRANGE, k=3000)) + end for end in ends for _ in range(4)]
    pairs = [
        PairInput(first="a query", second=document, max_tokens=limit) for document in documents for limit in (160, 300)
    ]
    longest: list[int] = []
    encode = SharedTokenizer.encode

    def watched(self: SharedTokenizer, texts: Sequence[str], *given: Any, **settings: Any) -> Any:
        longest.append(max(map(len, texts), default=0))
        return encode(self, texts, *given, **settings)

    monkeypatch.setattr(SharedTokenizer, "encode", watched)
    quick = [read(tokenizer, pair).ids for pair in pairs]
    assert max(longest) < min(map(len, documents)) / 2
    monkeypatch.setattr(SharedTokenizer, "without_middle", lambda self, text, *_: text)
    assert quick == [read(tokenizer, pair).ids for pair in pairs]
    assert max(longest) > max(map(len, documents))


def test_fields_are_filled_literally(tiny_folder: TinyFolder) -> None:
    _, theirs = load(KIND, tiny_folder)
    tokenizer = ours(tiny_folder, PairTemplate(text=FIELDS, instruction=DEFAULT))
    for query, document in (("{document}", "{query} {instruction}"), ("a", "{whether} \\1"), ("", "")):
        for instruction in (None, "be {query}", ""):
            filled = DEFAULT if instruction is None else instruction
            text = (
                f"<|im_start|>system\nJudge {{whether}} it meets.<|im_end|>\n<|im_start|>user\n<Instruct>: {filled}\n"
                f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
            pair = PairInput(first=query, second=document, instruction=instruction)
            assert read(tokenizer, pair).ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_special_tokens_are_added_only_where_the_template_says_so(tiny_folder: TinyFolder) -> None:
    source, theirs = load("roberta-mean", tiny_folder)
    pair = PairInput(first="a", second="b c d e")
    text = "a: {query}\nb: {document}\n"
    plain = reader(source, pair_template=PairTemplate(text=text))
    added = reader(source, pair_template=PairTemplate(text=text, add_special_tokens=True), max_tokens=60)
    assert read(plain, pair).ids == theirs("a: a\nb: b c d e\n", add_special_tokens=False)["input_ids"]
    assert read(added, pair).ids == theirs("a: a\nb: b c d e\n")["input_ids"]
    whole = read(added, pair).ids
    shorter = PairInput(first="a", second="b c d e", max_tokens=len(whole) - 2)
    assert read(added, shorter).ids == whole[:-4] + whole[-2:]


def test_structured_contents_and_arguments_reach_the_chat_template(tiny_folder: TinyFolder) -> None:
    flat, structured = PairTemplate(), PairTemplate(structured=True)
    pair = PairInput(first="a query", second="a document", instruction="find it")
    found = read(ours(tiny_folder, structured, chat_template=STRUCTURED), pair).ids
    assert found == read(ours(tiny_folder, flat), pair).ids
    with_argument = RERANKER_TEMPLATE + "{{ extra }}"
    argued = ours(tiny_folder, PairTemplate(arguments={"extra": " more"}), chat_template=with_argument)
    assert read(argued, pair).ids != found


def test_query_and_document_can_be_cut_to_their_own_tokens_first(tiny_folder: TinyFolder) -> None:
    _, theirs = load(KIND, tiny_folder)
    tokenizer = ours(tiny_folder, PairTemplate())
    pair = PairInput(first="one two three", second="six seven eight", max_first_tokens=2, max_second_tokens=3)

    def beginning(text: str, tokens: int) -> str:
        return text[: theirs(text, return_offsets_mapping=True)["offset_mapping"][tokens - 1][1]]

    short = PairInput(first=beginning(pair.first, 2), second=beginning(pair.second, 3))
    assert short.first != pair.first
    assert short.second != pair.second
    assert read(tokenizer, pair).ids == read(tokenizer, short).ids
    nothing = PairInput(first="one", second="two", max_first_tokens=0, max_second_tokens=0)
    assert read(tokenizer, nothing).ids == read(tokenizer, PairInput(first="", second="")).ids


def test_an_instruction_needs_a_place(tiny_folder: TinyFolder) -> None:
    pair = PairInput(first="a", second="b", instruction="be kind")
    without = RERANKER_TEMPLATE.replace('"eq", "system"', '"eq", "nobody"')
    for tokenizer in (
        ours(tiny_folder, PairTemplate(text="{query} {document}")),
        ours(tiny_folder, PairTemplate(), chat_template=without),
    ):
        rejected = rejection(tokenizer, pair)
        assert "takes no instruction" in str(rejected)
        assert rejected.param == "instruction"


def test_a_pair_that_is_too_long_is_rejected_in_words(tiny_folder: TinyFolder) -> None:
    tokenizer = ours(tiny_folder, PairTemplate(), max_tokens=150)
    long = rejection(tokenizer, PairInput(first="a", second="b " * 200))
    assert "maximum context length is 150 tokens" in str(long)
    nowhere = rejection(tokenizer, PairInput(first="a " * 200, second="b " * 200, max_tokens=150))
    assert "more than the limit of 150" in str(nowhere)
    for pair in (
        PairInput(first="\ud800", second="b"),
        PairInput(first="a", second="\ud800"),
        PairInput(first="a", second="b", instruction="\ud800"),
    ):
        assert "surrogate" in str(rejection(tokenizer, pair))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pair_template": PairTemplate(text="{query}")}, "one field {document}, has 0"),
        ({"pair_template": PairTemplate(text="{query} {query} {document}")}, "one field {query}, has 2"),
        ({"pair_template": PairTemplate(text="{instruction} {query} {document}")}, "there is no default instruction"),
        ({"chat_template": None}, "its tokenizer has none"),
        ({"chat_template": "{{ messages[0].content }}"}, "0 places for a document"),
        ({"chat_template": "{{ messages[0].content * 2 }}{{ messages[1].content }}"}, "2 places for a query"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "roles query and document"),
    ],
)
def test_a_template_that_is_not_one_for_pairs_is_rejected(
    settings: dict[str, Any], message: str, tiny_folder: TinyFolder
) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(tiny_folder, **{"template": settings.pop("pair_template", PairTemplate()), **settings})
