"""Folders that cut texts on the left: the end is kept, as transformers keeps it, unless a request says otherwise."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.runtime.requests import MODEL_MAX, PairInput, TextInput
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, WORDS, load, read, reader, some_text
from tests.models.tiny.tokenizer_files import write_layout
from tests.models.tokenizing.test_tokenizer_file import load as load_folder

LONG = " ".join(WORDS[:150])
"""Not longer: transformers keeps all that it cuts off, in parts, and more so on the left."""


@pytest.mark.parametrize("kind", ["real", "roberta-mean", "xlmr-prompt", "qwen3-embed-left"])
def test_the_end_of_a_text_is_kept(kind: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours, cuts_right = reader(source, max_tokens=64, truncation_side="left"), reader(source, max_tokens=64)
    theirs.truncation_side = "left"
    for text in (LONG, *STRANGE):
        for prompt in ("", "query: "):
            for limit in (5, 19, 64):
                wanted = theirs(prompt + text, truncation=True, max_length=limit)["input_ids"]
                assert read(ours, TextInput(text, max_tokens=limit), prompt=prompt).ids == wanted
    whole = read(ours, TextInput(LONG, max_tokens=MODEL_MAX, truncate_side="right")).ids
    assert whole == read(cuts_right, TextInput(LONG, max_tokens=MODEL_MAX)).ids
    assert whole != read(ours, TextInput(LONG, max_tokens=MODEL_MAX)).ids


@pytest.mark.parametrize("kind", ["real", "ce-xlmr-reranker", "ce-modernbert"])
def test_the_ends_of_both_texts_of_a_pair_are_kept(kind: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours, cuts_right = reader(source, truncation_side="left"), reader(source)
    theirs.truncation_side = "left"
    chance = random.Random(3)
    pairs = [(some_text(chance, 20), some_text(chance, 40)) for _ in range(12)]
    for first, second in [*pairs, (LONG, LONG), ("short", LONG), (LONG, "short")]:
        for limit in (9, 16, 33):
            (wanted,) = theirs([first], [second], truncation="longest_first", max_length=limit)["input_ids"]
            assert read(ours, PairInput(first=first, second=second, max_tokens=limit)).ids == wanted
            right = PairInput(first=first, second=second, max_tokens=limit, truncate_side="right")
            assert read(ours, right).ids == read(cuts_right, right).ids


def test_limits_of_their_own_keep_the_end_too(tiny_folder: TinyFolder) -> None:
    source, theirs = load("ce-bert-1label", tiny_folder)
    ours = reader(source, truncation_side="left")
    bare = theirs(LONG, add_special_tokens=False)["input_ids"]
    prompt = theirs("query:", add_special_tokens=False)["input_ids"]
    assert read(ours, TextInput(LONG, max_own_tokens=7)).ids[1:-1] == bare[-7:]
    assert read(ours, TextInput(LONG, max_own_tokens=7), prompt="query: ").ids[1:-1] == [*prompt, *bare[-7:]]
    pair = read(ours, PairInput(first=LONG, second=LONG, max_first_tokens=3, max_second_tokens=5)).ids
    assert (pair[1:4], pair[5:-1]) == (bare[-3:], bare[-5:])


def test_a_template_loses_the_beginning_of_the_document(tiny_folder: TinyFolder) -> None:
    source, _ = load("ce-qwen3-lm", tiny_folder)
    template = PairTemplate(text="Q: {query}\nD: {document}\nA:")
    ours = reader(source, pair_template=template, truncation_side="left")
    whole = read(ours, PairInput(first="a query", second=LONG)).ids
    before = len(source.backend.encode("Q: a query\nD:").ids)
    for limit in (40, 90, len(whole) - 1):
        ids = read(ours, PairInput(first="a query", second=LONG, max_tokens=limit)).ids
        assert ids == whole[:before] + whole[before + len(whole) - limit :]
        right = read(ours, PairInput(first="a query", second=LONG, max_tokens=limit, truncate_side="right")).ids
        assert (len(right), right != ids) == (limit, True)
    document = "one two three four"
    own = read(ours, PairInput(first="a query", second=document, max_second_tokens=3)).ids
    kept = document[source.backend.encode(document).offsets[-3][0] :]
    assert source.backend.decode(own) == f"Q: a query\nD: {kept}\nA:"


def test_it_is_read_from_the_settings_and_from_the_file(tmp_path: Path) -> None:
    folder = write_layout("ModernBERT", tmp_path / "model")
    assert load_folder(folder).truncation_side == "right"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(7, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_folder(folder).truncation_side == "left"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": "right"}))
    assert load_folder(folder).truncation_side == "right"
