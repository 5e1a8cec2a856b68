"""Token ids are those of `tokenizer.json`, whatever transformers' class makes of its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer, load_tokenizer
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import DENSE_ONLY, PairInput, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models.reading import read, reader
from tests.models.tiny.tokenizer_files import (
    BERT,
    LAYOUTS,
    LLAMA,
    bytes_bpe,
    edit_file,
    pieces,
    unigram,
    with_template,
    write_layout,
    write_tokenizer,
)
from tests.needed import needs

PROBES = [
    "Hello World, it is 2023 and 650841823 things",
    "\ufb01ne \uff26\uff55\uff4c\uff4c Caf\u00e9 na\u00efve e\u0301",
    "  two  blanks\r\nline\n\n\ttab ",
    "\u65e5\u672c\u8a9e \u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\U0001f642 ok \U0001f642\U0001f3fd",
    "a<s>b</s> [SEP]c[MASK] <pad>",
    "x",
    "trailing ",
]
NAMED = needs("transformers", "5.6", "the class that tokenizer_config.json names, beside any model_type,")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def load(folder: Path) -> LoadedTokenizer:
    config = json.loads((folder / "config.json").read_text())
    return load_tokenizer(ModelFolder(path=folder, body=folder, config=config, heads=(), prompts={}))


def oracle(folder: Path) -> Tokenizer:
    """Return the tokenizer of the file alone, without its saved truncation and padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_ids(ours: TextTokenizer, wanted: Tokenizer) -> None:
    """Compare texts, bare texts, prompts, pairs and /tokenize."""
    for text in PROBES:
        whole, bare = wanted.encode(text).ids, wanted.encode(text, add_special_tokens=False).ids
        assert read(ours, TextInput(text)).ids == whole
        assert read(ours, TextInput(text, add_special_tokens=False)).ids == bare
        assert read(ours, TextInput(text), prompt="query: ").ids == wanted.encode(f"query: {text}").ids
        assert ours.tokenize(text, add_special_tokens=True).ids == whole
        assert ours.detokenize(whole, skip_special_tokens=False) == wanted.decode(whole, skip_special_tokens=False)
        pair = wanted.encode("a query", text)
        sequence = read(ours, PairInput(first="a query", second=text), outputs=DENSE_ONLY)
        assert sequence.ids == pair.ids


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    folder = write_layout(name, tmp_path / "model")
    check_ids(reader(load(folder)), oracle(folder))


@pytest.mark.parametrize("name", ["BERT behind NFKC", "Llama as GPT-2", "DeBERTa"])
def test_truncation_and_padding_in_the_file_neither_cut_nor_fill(name: str, tmp_path: Path) -> None:
    folder = write_layout(name, tmp_path / "model")
    wanted = oracle(folder)
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(5)
    saved.enable_padding(length=40)
    saved.save(str(folder / "tokenizer.json"))
    check_ids(reader(load(folder)), wanted)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("BERT with Unigram", "BertTokenizer of transformers tokenizes all texts differently"),
        pytest.param(
            "XLM-R as RoBERTa", "RobertaTokenizer of transformers tokenizes all texts differently", marks=NAMED
        ),
        ("BERT, cased", "BertTokenizer of transformers tokenizes capitals, accents differently"),
        ("BERT behind NFKC", "BertTokenizer of transformers tokenizes compatibility forms differently"),
        ("Llama as GPT-2", "GPT2Tokenizer of transformers tokenizes numbers differently"),
        ("XLM-R", "blanks, line ends, CJK, emoji"),
        ("BERT, cased and said to be lower", "do_lower_case=true, but tokenizer.json does not, which is followed"),
        ("Llama without the first token", "add_bos_token=false, but tokenizer.json adds '<s>' before texts"),
    ],
)
def test_what_differs_is_said(name: str, kinds: str, tmp_path: Path) -> None:
    notes = load(write_layout(name, tmp_path / "model")).notes
    assert any(kinds in note for note in notes), notes


GRANITE = pytest.param("Granite", marks=needs("transformers", "5.9", "GPT2Tokenizer with the file's own digits"))


@pytest.mark.parametrize("name", ["BERT", "BERT without a class", GRANITE, "ModernBERT", "a class that is not known"])
def test_nothing_is_said_where_nothing_differs(name: str, tmp_path: Path) -> None:
    assert load(write_layout(name, tmp_path / "model")).notes == ()


def test_merges_are_not_left_out_at_random(tmp_path: Path) -> None:
    folder = write_layout("ModernBERT", tmp_path / "model")
    wanted = oracle(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit_file(folder, model=model | {"dropout": 0.5})
    check_ids(reader(load(folder)), wanted)


def test_types_of_pairs_are_the_file_s_where_its_class_gave_them_in_version_4(tmp_path: Path) -> None:
    folder = write_layout("BERT behind NFKC, fast", tmp_path / "model")
    assert not load(folder).gives_types
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"type_vocab_size": 2}))
    assert load(folder).gives_types
    sequence = read(reader(load(folder)), PairInput(first="a", second="b c"))
    assert sequence.first_tokens == oracle(folder).encode("a", "b c").type_ids.index(1)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for change in ({"model_input_names": ["input_ids", "attention_mask"]}, {"tokenizer_class": "TokenizersBackend"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | change))
        assert not load(folder).gives_types


@pytest.mark.parametrize("single", ["", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("asked", [("bos",), ("eos",), ("bos", "eos")])
def test_the_first_and_the_last_token_are_added_where_they_are_missing(
    single: str, asked: tuple[str, ...], tmp_path: Path
) -> None:
    settings = {f"add_{end}_token": True for end in asked}
    folder = write_tokenizer(tmp_path / "model", bytes_bpe(single=single), "mistral", **FAST, **LLAMA, **settings)
    source = load(folder)
    first, last = "bos" in asked or single.startswith("<s>"), "eos" in asked or single.endswith("</s>")
    begin, end = ["<s>"] * first, ["</s>"] * last
    ours, bare = reader(source), oracle(folder).encode("some text", add_special_tokens=False).tokens
    ids = read(ours, TextInput("some text")).ids
    assert [ours.shared.tokenizer.id_to_token(i) for i in ids] == [*begin, *bare, *end]
    assert ours.tokenize("some text", add_special_tokens=True).ids == ids
    assert read(ours, TextInput("some text", add_special_tokens=False)).ids == ids[first : len(ids) - last]
    changed = [("bos" in asked and not single.startswith("<s>")), ("eos" in asked and not single.endswith("</s>"))]
    assert sum("is added" in note for note in source.notes) == sum(changed)


def test_each_text_of_a_pair_ends_with_the_token_that_is_added(tmp_path: Path) -> None:
    tokenizer = with_template(bytes_bpe(), "<s> $A", "<s> $A <s>:1 $B:1")
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **FAST, **LLAMA, add_eos_token=True)
    ours = load(folder).backend
    assert ours.encode("x", "y").tokens == ["<s>", "x", "</s>", "<s>", "y", "</s>"]
    assert ours.encode("x", "y").type_ids == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_eos_token": True, "eos_token": "<end>"}, "eos_token is not in the vocabulary: '<end>'"),
        ({"add_eos_token": "yes"}, "add_eos_token='yes' must be of type bool"),
        ({"truncation_side": "middle"}, "truncation_side='middle' must be 'left' or 'right'"),
        ({"padding_side": "up"}, "padding_side='up' must be 'left' or 'right'"),
        ({"model_max_length": "512"}, "model_max_length='512' must be a number"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "keep one tokenizer.json"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex=true needs another pre-tokenizer"),
        ({"added_tokens_decoder": {"5": 7}}, "added_tokens_decoder: '5': 7 is not a token with its id"),
    ],
)
def test_a_setting_that_cannot_be_used_is_rejected_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tokenizer = bytes_bpe(single="<s> $A")
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **(FAST | LLAMA | {"eos_token": None} | settings))
    with pytest.raises(ConfigError, match=r"^tokenizer_config\.json: ") as caught:
        load(folder)
    assert message in str(caught.value)


def test_a_post_processor_without_a_place_for_the_token_is_rejected(tmp_path: Path) -> None:
    tokenizer = unigram()
    tokenizer.post_processor = processors.RobertaProcessing(("<s>", 0), ("<s>", 0))
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **FAST, **LLAMA, add_eos_token=True)
    with pytest.raises(ConfigError, match="come from RobertaProcessing, to which '</s>' cannot be added"):
        load(folder)


def test_special_tokens_are_split_where_the_folder_says_so(tmp_path: Path) -> None:
    tokenizer = bytes_bpe(single="<s> $A </s>")
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **FAST, **LLAMA, split_special_tokens=True)
    wanted = oracle(folder)
    assert wanted.encode("a<s>b").ids != (wanted.encode("a<s>b", add_special_tokens=False).ids)
    whole = wanted.encode("a</s>b").ids
    wanted.encode_special_tokens = True
    assert wanted.encode("a</s>b").ids != whole
    check_ids(reader(load(folder)), wanted)


@pytest.mark.parametrize(("cleans", "spelled"), [(True, "it's so, isn't it?"), (False, "it ' s so , is n ' t it ?")])
def test_decoded_text_is_cleaned_up_where_the_folder_says_so(cleans: bool, spelled: str, tmp_path: Path) -> None:
    tokenizer = pieces(None)
    tokenizer.decoder = None
    folder = write_tokenizer(tmp_path / "model", tokenizer, "bert", **BERT, clean_up_tokenization_spaces=cleans)
    ours = reader(load(folder))
    words = ["it", "'", "s", "so", ",", "is", "n", "'", "t", "it", "?"]
    ids = [int(ours.shared.tokenizer.token_to_id(word) or 0) for word in words]
    assert ours.detokenize(ids, skip_special_tokens=True) == spelled


def test_blanks_of_bpe_are_its_own(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path / "model", bytes_bpe(), "llama", **FAST, **LLAMA, clean_up_tokenization_spaces=True
    )
    ours = reader(load(folder))
    ids = ours.tokenize("a . b , c", add_special_tokens=False).ids
    assert ours.detokenize(ids, skip_special_tokens=True) == "a . b , c"


def test_tokens_that_only_the_settings_name_are_read_as_such(tmp_path: Path) -> None:
    tokenizer = bytes_bpe()
    rows = tokenizer.get_vocab_size()
    folder = write_tokenizer(
        tmp_path / "model",
        tokenizer,
        "llama",
        **FAST,
        **LLAMA,
        added_tokens_decoder={
            str(rows): {"content": "<|first|>", "special": True},
            str(rows + 9): {"content": "<|gap|>", "special": True},
        },
        extra_special_tokens=["<|second|>"],
        image_token="<|third|>",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows + 2}))
    source = load(folder)
    ours = reader(source)
    assert ours.tokenize("<|first|><|second|>", add_special_tokens=False).ids == [rows, rows + 1]
    for text in ("a <|gap|>", "a <|third|>"):
        assert ours.tokenize(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special_tokens=False).ids
    said = " ".join(source.notes)
    assert "'<|gap|>' is not in tokenizer.json, and is read as ordinary text: its id would be" in said
    assert (
        f"'<|third|>' is not in tokenizer.json, and is read as ordinary text: the weights have {rows + 2} rows" in said
    )


def test_special_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    tokenizer = bytes_bpe()
    rows = tokenizer.get_vocab_size()
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **FAST, **LLAMA)
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    listed = {
        "additional_special_tokens": [{"content": "<|first|>", **flags}],
        "eos_token": {"content": "</s>", **flags},
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(listed))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows + 1}))
    source = load(folder)
    assert reader(source).tokenize("<|first|></s>", add_special_tokens=False).ids == [
        rows,
        tokenizer.token_to_id("</s>"),
    ]
    assert source.special_tokens["eos_token"] == "</s>"


def _object(content: str) -> dict[str, Any]:
    return {"content": content, **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)}


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizer"])
@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": [_object("<img>"), "<doc>"]},
        {"extra_special_tokens": {"image_token": _object("<img>")}},
        {"additional_special_tokens": ["<img>"], "extra_special_tokens": [_object("<doc>")]},
        {"bos_token": _object("<s>"), "eos_token": _object("</s>"), "pad_token": _object("<pad>")},
    ],
    ids=["a list", "by name", "under both names", "the usual ones"],
)
def test_special_tokens_of_the_settings_may_be_objects_without_a_type(
    settings: dict[str, Any], class_name: str, tmp_path: Path
) -> None:
    tokenizer = bytes_bpe(single="<s> $A </s>")
    tokenizer.add_special_tokens(["<img>", "<doc>"])
    settings = {**LLAMA, "tokenizer_class": class_name, **settings}
    folder = write_tokenizer(tmp_path / "model", tokenizer, "llama", **settings)
    source = load(folder)
    assert reader(source).tokenize("a<img>b<doc>", add_special_tokens=True).ids == tokenizer.encode("a<img>b<doc>").ids
    assert source.special_tokens["eos_token"] == "</s>"


def test_a_token_of_the_vocabulary_that_is_named_as_special_is_one_token(tmp_path: Path) -> None:
    tokenizer = bytes_bpe()
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["<|im_end|>"] = rows = tokenizer.get_vocab_size()
    folder = write_tokenizer(
        tmp_path / "model",
        Tokenizer.from_str(json.dumps(content)),
        "qwen2",
        **FAST,
        **(LLAMA | {"eos_token": "<|im_end|>"}),
    )
    assert len(oracle(folder).encode("a<|im_end|>").ids) > 2
    assert reader(load(folder)).tokenize("a<|im_end|>", add_special_tokens=False).ids[-1] == rows


def test_a_setting_that_nobody_knows_is_said(tmp_path: Path) -> None:
    settings = {**LLAMA, "blanks_become": "dots", "never_split": ["ab"], "legacy": True, "use_fast": True}
    notes = load(write_tokenizer(tmp_path / "model", bytes_bpe(), "llama", **FAST, **settings)).notes
    assert any("blanks_become is not known, and is ignored" in note for note in notes)
    assert any("never_split=['ab'] is ignored: tokenizer.json is followed" in note for note in notes)
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("name", "value", "contradicts"),
    [
        ("do_lower_case", True, True),
        ("do_lower_case", False, False),
        ("strip_accents", True, True),
        ("add_prefix_space", True, True),
        ("add_prefix_space", False, False),
        ("tokenize_chinese_chars", True, True),
    ],
)
def test_settings_that_say_otherwise_than_the_file_are_said(
    name: str, value: bool, contradicts: bool, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "model", bytes_bpe(), "llama", **FAST, **LLAMA, **{name: value})
    source = load(folder)
    check_ids(reader(source), oracle(folder))
    assert any(f"{name}={str(value).lower()}, but tokenizer.json" in note for note in source.notes) == contradicts


@NAMED
def test_a_class_that_cannot_be_built_leaves_the_file(tmp_path: Path) -> None:
    folder = write_layout("XLM-R", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer", **BERT}))
    source = load(folder)
    check_ids(reader(source), oracle(folder))
    assert any("transformers cannot build the tokenizer's class" in note for note in source.notes)


def test_types_of_pairs_are_the_file_s_where_their_class_cannot_be_built(tmp_path: Path) -> None:
    folder = write_layout("BERT", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer", **BERT}))
    config = json.loads((folder / "config.json").read_text())
    for types, given in ((1, False), (2, True)):
        (folder / "config.json").write_text(json.dumps(config | {"type_vocab_size": types}))
        assert load(folder).gives_types == given


@NAMED
def test_a_class_in_python_that_does_something_else_is_rejected(tmp_path: Path) -> None:
    folder = write_layout("BERT, cased", tmp_path / "model")
    vocabulary = oracle(folder).get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)))
    settings = {"tokenizer_class": "EsmTokenizer", **BERT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="tokenizer_class='EsmTokenizer' is written in Python and tokenizes words"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "class_name", "vocabulary", "message"),
    [  # neither sentencepiece nor protobuf is needed by any test, nor installed for them
        ("xlm-roberta", "XLMRobertaTokenizer", "sentencepiece.bpe.model", "needs packages that are not installed: run"),
        ("llama", None, "tokenizer.model", "needs packages that are not installed: run `pip install sentencepiece"),
        ("bert", "NobodysTokenizer", "vocab.txt", "tokenizer_class='NobodysTokenizer' is not known to transformers"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_names_what_is_missing(
    model_type: str, class_name: str | None, vocabulary: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    (tmp_path / vocabulary).write_text("[PAD]\n[UNK]\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # transformers 5.4 reads words that way
def test_a_vocabulary_without_the_file_is_read_by_its_class(tmp_path: Path) -> None:
    folder = write_layout("BERT", tmp_path / "model")
    wanted = oracle(folder)
    vocabulary = wanted.get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    (folder / "tokenizer.json").unlink()
    check_ids(reader(load(folder)), wanted)


def test_special_tokens_in_a_text_are_read_as_the_file_says_everywhere(tmp_path: Path) -> None:
    folder = write_layout("ModernBERT", tmp_path / "model")
    ours, wanted = reader(load(folder)), oracle(folder)
    end = int(wanted.token_to_id("</s>") or 0)
    text = "one </s> two"
    bare = wanted.encode(text, add_special_tokens=False).ids
    assert bare.count(end) == 1
    (prompted,) = ours.preprocess([ModelInput(TextInput("two"), DENSE_ONLY, prompt="one </s> ")])
    assert prompted.payload.ids[1:-1] == bare  # type: ignore[union-attr]
    assert read(ours, TextInput(text)).ids[1:-1] == bare
    assert read(ours, TextInput(text, max_tokens=4)).ids[1:-1] == bare[:2]
    assert read(ours, PairInput(first=text, second="x")).ids.count(end) == wanted.encode(text, "x").ids.count(end)
    assert ours.tokenize(text, add_special_tokens=False).ids == bare


def test_steps_that_the_library_panics_on_are_told_by_the_name_of_their_file(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", pieces(None), "llama", **FAST, **LLAMA)
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    step = json.loads(template.__getstate__())
    edit_file(folder, post_processor={"type": "Sequence", "processors": [step, step]})
    with pytest.raises(ConfigError, match=r"the tokenizer cannot be loaded: tokenizer\.json: not yet implemented"):
        load(folder)
