"""Models that read images between texts give transformers' vectors, alone and together."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.images import decode
from staged_pool.runtime.models.images.decode import Encoded
from staged_pool.runtime.models.images.formats import find_format
from staged_pool.runtime.models.kernels.linear import PrepackedLinear
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.vision_language import VisionLanguageTower
from staged_pool.runtime.models.vision.image_layout import grid_positions, image_token_places
from staged_pool.runtime.models.vision.patches import PatchLinear, flatten_patches
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.requests import MODEL_MAX, Chat, EmbedRequest, Image, Output, ScoreRequest, TextInput
from staged_pool.runtime.results import EmbedResult, ScoreResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import ConfigError, InvalidInput, UnusableMedia
from staged_pool.stages.work import Prepared, Request
from tests.models import image_oracle as oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, Part
from tests.models.oracle import apart
from tests.models.requests import text_tower
from tests.models.tiny import PAGES, SEEING, VISION_LANGUAGE, edit_json

Messages: TypeAlias = list[tuple[str, list[Part]]]
Load: TypeAlias = Callable[..., Encoder]

WIDE, TALL, LARGE, SMALL, SQUARE = (
    encode(100, 80, "JPEG", 0),
    encode(70, 150, "PNG", 1),
    encode(333, 240, "WEBP", 2),
    encode(31, 47, "PNG", 3),
    encode(640, 640, "JPEG", 4),
)
IMAGES = [WIDE, TALL, LARGE, SMALL, SQUARE]
CONVERSATIONS: list[Messages] = [
    [("user", [WIDE, "What is this?"])],
    [("user", ["first", TALL, "and then", LARGE])],
    [("user", [SMALL]), ("assistant", ["A sheet of paper."]), ("user", ["and", SQUARE, "?"])],
    [("user", [WIDE, TALL, WIDE])],
]
PREFIX = {"colqwen2": "Query: ", "colpali": "Question: "}
QUERIES = ["A function call with many arguments", "naïve café, Ωmega 🙂", "short"]
MULTI = frozenset({Output.MULTI_VECTOR})

EXACT = 1e-4
"""At float32, where images are prepared by transformers' own code."""
ROUNDED = 1e-6
"""Two forwards of the same ids and pixels: threads share them as the machine allows, which rounds otherwise."""


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    """Load a kind of tiny model in float32 with exact images, once for each settings."""
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str, **settings: Any) -> Encoder:
        config = EngineConfig(model=str(tiny_folder(kind)), **({"dtype": "float32", "image_path": "exact"} | settings))
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def chat(messages: Messages, **options: object) -> Chat:
    return Chat(
        tuple(
            {
                "role": role,
                "content": tuple(Image(part, options) if isinstance(part, bytes) else part for part in parts),
            }
            for role, parts in messages
        )
    )


def said(messages: Messages, **others: Any) -> TextInput:
    return TextInput(chat(messages), add_special_tokens=False, **others)


def read(model: Encoder, request: Request) -> list[Prepared[Any]]:
    """Return the device's input for each input, asked lane by lane as the engine does."""
    found = []
    for given in plan(request, model.card).inputs:
        (prepared,) = model.preprocess([given])
        if isinstance(prepared, Exception):
            raise prepared
        assert isinstance(prepared, Prepared)
        found.append(prepared)
    return found


def ask(model: Encoder, request: Request, *, alone: bool = False) -> Any:
    """Return the answer, when inputs share batches as they may, or each runs alone."""
    prepared = read(model, request)
    batches: dict[Any, list[int]] = {}
    for place, each in enumerate(prepared):
        batches.setdefault((each.batch_key, place if alone else None), []).append(place)
    rows: list[Any] = [None] * len(prepared)
    for places in batches.values():
        found = model.forward([prepared[place].payload for place in places])
        for place, row in zip(places, found, strict=True):
            assert isinstance(row, Row)
            rows[place] = row
    return plan(request, model.card).finish(rows, sum(each.tokens for each in prepared))


def embed(model: Encoder, *inputs: TextInput | Image, alone: bool = False, **others: Any) -> EmbedResult:
    result: EmbedResult = ask(model, EmbedRequest(inputs=inputs, **others), alone=alone)
    return result


def dense(model: Encoder, *inputs: TextInput | Image, **others: Any) -> Sequence[Array]:
    found = embed(model, *inputs, **others).dense
    assert found is not None
    return list(found)


def vectors(model: Encoder, *inputs: TextInput | Image, **others: Any) -> tuple[Array, ...]:
    found = embed(model, *inputs, outputs=MULTI, **others).multi_vector
    assert found is not None
    return found


def cosine(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    assert [rows.shape for rows in found] == [rows.shape for rows in wanted]
    return min(float((ours * theirs).sum(axis=-1).min()) for ours, theirs in zip(found, wanted, strict=True))


# Conversations


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", SEEING)
def test_conversations_with_images_have_the_oracles_vectors(
    kind: str, attention: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, folder = load(kind, attention=attention), tiny_folder(kind)
    assert model.card.attention == attention
    assert model.card.lanes == ("text", "image")
    found = dense(model, *map(said, CONVERSATIONS))
    assert apart(found, [oracle.conversation(folder, messages) for messages in CONVERSATIONS]) < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_the_oracle_tells_images_places_and_words_apart(kind: str, tiny_folder: TinyFolder) -> None:
    of = partial(oracle.conversation, tiny_folder(kind))
    found = [
        of([("user", [WIDE, "What is this?"])]),
        of([("user", [encode(100, 80, "JPEG", 7), "What is this?"])]),
        of([("user", [WIDE, "What was this?"])]),
        of([("user", ["What is this?", WIDE])]),
        of([("user", [WIDE, TALL])]),
        of([("user", [TALL, WIDE])]),
    ]
    assert min(float(np.abs(a - b).max()) for a, b in itertools.combinations(found, 2)) > 100 * EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_an_image_alone_is_a_message_of_it(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    found = dense(load(kind), *map(Image, IMAGES))
    wanted = [oracle.conversation(tiny_folder(kind), [("user", [image])]) for image in IMAGES]
    assert apart(found, wanted) < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_texts_of_a_model_that_sees_are_read_as_texts(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    words: Messages = [("user", ["no image", "in this"])]
    request = EmbedRequest(inputs=(TextInput("hello there"), said(words), Image(WIDE)))
    keys = [each.batch_key for each in read(model, request)]
    assert keys[0] == keys[1] != keys[2]
    assert [given.lane for given in plan(request, model.card).inputs] == ["text", "text", "image"]
    found = dense(model, TextInput("hello there"), said(words))
    wanted = [oracle.text(folder, "hello there"), oracle.conversation(folder, words)]
    assert apart(found, wanted) < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_a_prompt_and_the_beginning_of_an_answer_stand_around_a_conversation(
    kind: str, tiny_folder: TinyFolder, load: Load
) -> None:
    given = TextInput(Chat(chat(CONVERSATIONS[0]).messages, add_generation_prompt=True), add_special_tokens=False)
    found = dense(load(kind), given, prompt="Find what is like this.")
    wanted = oracle.conversation(
        tiny_folder(kind), CONVERSATIONS[0], system="Find what is like this.", add_generation_prompt=True
    )
    assert apart(found, [wanted]) < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_tokens_and_their_positions_are_the_oracles(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    tower = model.towers["image"]
    assert isinstance(tower, VisionLanguageTower)
    for messages in CONVERSATIONS:
        (prepared,) = read(model, EmbedRequest(inputs=(said(messages),)))
        ids, given = oracle.tokens(folder, messages)
        sequence: TokenSequence = prepared.payload
        assert sequence.ids == ids[0].tolist()
        layout = tower.image_embedder.layout
        where = grid_positions(sequence, image_token_places(sequence, layout), layout)
        assert np.array_equal(where, oracle.positions(folder, ids, given))


@pytest.mark.parametrize("path", ["fast", "exact"])
@pytest.mark.parametrize("kind", SEEING)
def test_a_conversation_that_is_only_tokenized_has_the_oracles_tokens(
    kind: str, path: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, folder = load(kind, image_path=path), tiny_folder(kind)
    for messages in CONVERSATIONS:
        for options in ({}, {"max_pixels": 6 * 28 * 28}):
            found = model.tokenize(chat(messages, **options), add_special_tokens=False)
            ids, _ = oracle.tokens(folder, messages, options=options)
            assert found.ids == ids[0].tolist()
            assert len(found.strings) == len(found.spans) == len(found.ids)
            assert len({*zip(found.ids, found.strings, strict=True)}) == len({*found.ids})
            assert found.strings.count("<|image_pad|>") > len(messages)


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_that_is_only_tokenized_has_the_processors_tokens(
    kind: str, tiny_folder: TinyFolder, load: Load
) -> None:
    for image in IMAGES:
        found = load(kind).tokenize(chat([("user", [image])]), add_special_tokens=False)
        assert found.ids == oracle.page_tokens(tiny_folder(kind), image)
        assert len(found.strings) == len(found.ids)
        assert found.spans == [None] * len(found.ids)
    with pytest.raises(InvalidInput, match="one image or one text at a time"):
        load(kind).tokenize(chat([("user", [WIDE, "a word"])]), add_special_tokens=False)


def test_images_are_not_decoded_to_count_their_tokens_and_no_more_are_looked_at_than_the_model_takes(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen2-vl", image_path="fast")
    monkeypatch.setattr(Encoded, "decode", None)
    assert len(model.tokenize(chat([("user", [SQUARE])]), add_special_tokens=False).ids) > 36
    opened = []

    def spy(data: bytes) -> Any:
        opened.append(data)
        return find_format(data)

    monkeypatch.setattr(decode, "find_format", spy)
    with pytest.raises(InvalidInput, match="the first 9 of the 100 images in your input take 324 tokens") as caught:
        model.tokenize(chat([("user", [SQUARE] * 100)]), add_special_tokens=False)
    assert caught.value.param == "messages"
    assert len(opened) == 9
    wrong: list[tuple[list[Part], str]] = [
        ([WIDE, b"no image"], "Image 2 of 2: "),
        ([WIDE, "<|image_pad|>"], "may contain the image token"),
    ]
    for parts, why in wrong:
        with pytest.raises(InvalidInput, match=why):
            model.tokenize(chat([("user", parts)]), add_special_tokens=False)


@pytest.mark.parametrize("kind", SEEING)
def test_options_of_an_image_change_how_many_tokens_it_takes(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    counts = set()
    for options in ({}, {"max_pixels": 6 * 28 * 28}, {"min_pixels": 30 * 28 * 28}):
        messages: Messages = [("user", [SQUARE, "and", SMALL])]
        given = TextInput(chat(messages, **options), add_special_tokens=False)
        (prepared,) = read(model, EmbedRequest(inputs=(given,)))
        ids, _ = oracle.tokens(folder, messages, options=options)
        assert prepared.payload.ids == ids[0].tolist()
        counts.add(prepared.tokens)
        assert apart(dense(model, given), [oracle.conversation(folder, messages, options=options)]) < EXACT
    assert len(counts) == 3


@pytest.mark.parametrize("kind", SEEING)
def test_usage_counts_the_tokens_of_images(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    usage = embed(load(kind), *map(said, CONVERSATIONS), TextInput("hello")).usage
    shown = sum(oracle.tokens(tiny_folder(kind), messages)[0].shape[1] for messages in CONVERSATIONS)
    words = read(load(kind), EmbedRequest(inputs=(TextInput("hello"),)))[0].tokens
    assert usage.prompt_tokens == shown + words


@pytest.mark.parametrize("kind", SEEING)
def test_a_conversation_scores_texts_images_and_both(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    query, both = chat([("user", [TALL, "like this"])]), chat([("user", ["it is", WIDE])])
    result: ScoreResult = ask(
        model, ScoreRequest(queries=(query,), documents=("a text", Image(LARGE), both, "another"))
    )
    wanted = np.array(
        [
            oracle.text(folder, "a text"),
            oracle.conversation(folder, [("user", [LARGE])]),
            oracle.conversation(folder, [("user", ["it is", WIDE])]),
            oracle.text(folder, "another"),
        ]
    ) @ oracle.conversation(folder, [("user", [TALL, "like this"])])
    assert np.abs(result.scores - wanted).max() < EXACT


# Pages


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", PAGES)
def test_pages_and_queries_have_the_oracles_vectors(
    kind: str, attention: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, folder = load(kind, attention=attention), tiny_folder(kind)
    assert model.card.attention == attention
    assert model.card.outputs == (Output.MULTI_VECTOR,)
    pages = vectors(model, *map(Image, IMAGES))
    assert apart(pages, [oracle.page(folder, image) for image in IMAGES]) < EXACT
    queries = vectors(model, *map(TextInput, QUERIES), prompt_name="query")
    assert apart(queries, [oracle.query(folder, query) for query in QUERIES]) < EXACT


@pytest.mark.parametrize("kind", PAGES)
def test_the_oracle_tells_pages_and_queries_apart(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    pages = [oracle.page(folder, image).mean(axis=0) for image in IMAGES]
    queries = [oracle.query(folder, query).mean(axis=0) for query in QUERIES]
    for found in (pages, queries):
        assert min(float(np.abs(a - b).max()) for a, b in itertools.combinations(found, 2)) > 100 * EXACT


@pytest.mark.parametrize("kind", PAGES)
def test_tokens_of_pages_and_queries_are_the_processors(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    read_pages = read(model, EmbedRequest(inputs=tuple(map(Image, IMAGES)), outputs=MULTI))
    assert [each.payload.ids for each in read_pages] == [oracle.page_tokens(folder, image) for image in IMAGES]
    asked = EmbedRequest(inputs=tuple(map(TextInput, QUERIES)), outputs=MULTI, prompt_name="query")
    assert [each.payload.ids for each in read(model, asked)] == [oracle.query_tokens(folder, q) for q in QUERIES]


@pytest.mark.parametrize("kind", PAGES)
def test_scores_of_pages_are_maxsim(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(kind), tiny_folder(kind)
    assert model.card.scoring == "late-interaction"
    pages = [oracle.page(folder, image) for image in IMAGES]
    for query in QUERIES:
        result: ScoreResult = ask(model, ScoreRequest(queries=(query,), documents=tuple(map(Image, IMAGES))))
        asked = oracle.query(folder, query)
        wanted = [float((asked @ page.T).max(axis=1).sum()) for page in pages]
        assert np.abs(result.scores - wanted).max() < EXACT
        assert result.usage.prompt_tokens == len(asked) + sum(map(len, pages))


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_may_come_as_the_only_message(kind: str, load: Load) -> None:
    model = load(kind)
    asked = [EmbedRequest(inputs=(page,), outputs=MULTI) for page in (said([("user", [WIDE])]), Image(WIDE))]
    ((message,), (alone,)) = (read(model, request) for request in asked)
    assert message.payload.ids == alone.payload.ids
    assert apart(vectors(model, said([("user", [WIDE])])), vectors(model, Image(WIDE))) < ROUNDED


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("messages", [[("user", [WIDE, "a word"])], [("user", [WIDE, TALL])], CONVERSATIONS[2]])
def test_models_of_pages_read_no_conversations(kind: str, messages: Messages, load: Load) -> None:
    with pytest.raises(InvalidInput, match="one image or one text at a time"):
        vectors(load(kind), said(messages))


@pytest.mark.parametrize("kind", PAGES)
def test_cutting_a_query_leaves_what_stands_around_it(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    long = "A function call with many arguments and one more. " * 40
    request = EmbedRequest(inputs=(TextInput(long, 40),), outputs=MULTI, prompt_name="query")
    (cut,) = read(load(kind), request)
    whole = oracle.query_tokens(tiny_folder(kind), long)
    behind = 11  # ten tokens to think with, and the end of the line
    assert cut.payload.ids == whole[: 40 - behind] + whole[-behind:]


@pytest.mark.parametrize(("kind", "before"), [("colqwen2", 0), ("colpali", 1)])
def test_a_text_without_a_role_is_read_without_what_stands_around_a_query(
    kind: str, before: int, tiny_folder: TinyFolder, load: Load
) -> None:
    (text,) = read(load(kind), EmbedRequest(inputs=(TextInput("Query: a word"),), outputs=MULTI))
    (marked,) = read(load(kind), EmbedRequest(inputs=(TextInput("a word"),), outputs=MULTI, prompt_name="query"))
    own = len(load(kind).tokenize("Query: a word", add_special_tokens=False).ids)
    assert text.tokens == before + own
    assert (
        marked.tokens == before + len(load(kind).tokenize(PREFIX[kind] + "a word", add_special_tokens=False).ids) + 11
    )


# Together and alone, fast and exact, wide and narrow


def _all(kind: str) -> list[TextInput | Image]:
    if kind in PAGES:
        return [*map(Image, IMAGES)]
    return [*map(said, CONVERSATIONS), *map(Image, IMAGES)]


def _answers(model: Encoder, kind: str, **others: Any) -> Sequence[Array]:
    return vectors(model, *_all(kind), **others) if kind in PAGES else dense(model, *_all(kind), **others)


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_a_vector_does_not_depend_on_what_shares_its_batch(kind: str, attention: str, load: Load) -> None:
    model = load(kind, attention=attention)
    assert apart(_answers(model, kind, alone=True), _answers(model, kind)) < EXACT / 4


@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_images_that_are_prepared_fast_give_nearly_the_same(kind: str, load: Load) -> None:
    fast = load(kind, image_path="fast")
    assert cosine(_answers(fast, kind), _answers(load(kind), kind)) > 0.999


@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_bfloat16_is_as_near_as_it_can_be(kind: str, load: Load) -> None:
    narrow = load(kind, dtype="bfloat16")
    assert narrow.card.attention == "packed"
    assert cosine(_answers(narrow, kind), _answers(load(kind), kind)) > 0.98
    assert cosine(_answers(narrow, kind, alone=True), _answers(narrow, kind)) > 0.99


@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_weights_are_laid_out_for_the_processor_in_image_encoder_and_language_model(kind: str, load: Load) -> None:
    tower = load(kind).towers["image"]
    assert isinstance(tower, VisionLanguageTower)
    for part in tower.image_embedder.parts():
        kinds = {type(module) for module in part.modules()}
        assert PrepackedLinear in kinds
        assert not kinds & {torch.nn.Linear, torch.nn.Conv3d}
    assert any(isinstance(module, PrepackedLinear) for module in text_tower(load(kind)).transformer.model.modules())


def test_a_convolution_of_whole_patches_is_a_product_of_matrices() -> None:
    convolution = torch.nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    model = torch.nn.ModuleList([convolution, torch.nn.Conv3d(8, 8, 1, padding=1)])
    patches = torch.randn(5, 3, 2, 4, 4)
    with torch.inference_mode():
        wanted = convolution(patches)
        restore = flatten_patches(model)
        flat, other = model
        assert isinstance(flat, PatchLinear)
        assert isinstance(other, torch.nn.Conv3d)  # it may look beyond a patch
        assert (flat(patches) - wanted).abs().max() < 1e-5
        with pytest.raises(ValueError, match="the kernel has"):
            flat(torch.randn(5, 4, 2, 4, 4))
    restore()
    assert next(iter(model)) is convolution


# Rejections


def rejection(model: Encoder, given: TextInput | Image, **others: Any) -> InvalidInput:
    request = EmbedRequest(inputs=(given,), outputs=frozenset(model.card.outputs[:1]), **others)
    with pytest.raises(InvalidInput) as caught:
        read(model, request)
    return caught.value


def test_an_input_that_is_too_long_is_rejected(load: Load) -> None:
    messages: Messages = [("user", [SQUARE] * 9)]
    error = rejection(load("qwen2-vl"), said(messages))
    assert "maximum context length is 320 tokens" in str(error)
    assert "324 of them for images" in str(error)
    assert error.param == "input"


def test_no_more_images_are_prepared_than_the_model_could_take(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may become millions of bytes."""
    model = load("qwen2-vl")
    assert model.images is not None
    read_one, prepared = model.images.read, []

    def spy(image: Image, scope: object = None) -> Any:
        prepared.append(image)
        return read_one(image, scope)

    monkeypatch.setattr(model.images, "read", spy)
    error = rejection(model, said([("user", [SQUARE] * 100)]))
    assert "the first 9 of the 100 images in your input take 324 tokens" in str(error)
    assert error.param == "messages"
    assert len(prepared) == 9


@pytest.mark.parametrize("side", ["left", "right"])
def test_words_are_cut_and_images_are_not(side: Any, tiny_folder: TinyFolder, load: Load) -> None:
    model = load("qwen2-vl")
    words = "many words " * 20
    messages: Messages = [("user", [WIDE, words] if side == "right" else [words, WIDE])]
    whole = oracle.tokens(tiny_folder("qwen2-vl"), messages)[0][0].tolist()
    (cut,) = read(model, EmbedRequest(inputs=(said(messages, max_tokens=45, truncate_side=side),)))
    assert cut.payload.ids == (whole[:45] if side == "right" else whole[-45:])
    wrong: Messages = [("user", [words, WIDE] if side == "right" else [WIDE, words])]
    for room in (1, 45):
        error = rejection(model, said(wrong, max_tokens=room, truncate_side=side))
        assert "would cut an image" in str(error)
        assert error.param == "max_tokens"
    assert rejection(model, said([("user", [SQUARE] * 9)], max_tokens=MODEL_MAX)).param == "max_tokens"
    assert "truncation is off" in str(rejection(model, said(messages, max_tokens=45, must_fit=True)))


def test_a_limit_on_own_tokens_does_not_cut_images(load: Load) -> None:
    model = load("qwen2-vl")
    documents = (chat([("user", [WIDE, "many words " * 9])]),)
    request = ScoreRequest(queries=("x",), documents=documents, max_document_tokens=40)
    assert [each.tokens for each in read(model, request)][1] == 40
    with pytest.raises(InvalidInput, match="would cut an image"):
        read(model, ScoreRequest(queries=("x",), documents=documents, max_document_tokens=20))


def test_a_text_cannot_pose_as_an_image(load: Load) -> None:
    for words in ("<|image_pad|>", "<|vision_start|><|image_pad|><|image_pad|>"):
        error = rejection(load("qwen2-vl"), said([("user", [WIDE, words])]))
        assert "may contain the image token" in str(error)
        assert error.param == "messages"


def test_an_invalid_image_is_named_by_its_place(load: Load) -> None:
    model = load("qwen2-vl")
    error = rejection(model, said([("user", [WIDE, b"no image", TALL])]))
    assert str(error).startswith("Image 2 of 3: ")
    assert error.param == "messages"
    damaged = rejection(model, Image(LARGE[: len(LARGE) // 2]))
    assert isinstance(damaged, UnusableMedia)
    assert damaged.param == "input"


def test_a_wrong_input_leaves_the_others_as_they_are(load: Load) -> None:
    model = load("colpali")
    given = [ModelInput(Image(data), MULTI) for data in (WIDE, b"no image", TALL)]
    found = model.preprocess(given)
    assert [isinstance(each, Prepared) for each in found] == [True, False, True]


# Folders


def copied(kind: str, tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(kind), tmp_path / "model"))


def loaded(folder: Path) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_a_folder_without_an_image_processor_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied("qwen2-vl", tiny_folder, tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        loaded(folder)


def test_patches_that_are_merged_otherwise_than_the_weights_want_are_rejected(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = copied("qwen2-vl", tiny_folder, tmp_path)
    edit_json(folder / "preprocessor_config.json", merge_size=1)
    with pytest.raises(ConfigError, match="merge_size=1"):
        loaded(folder)


def test_words_around_a_page_and_a_query_are_the_folders(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied("colqwen2", tiny_folder, tmp_path)
    words = {"query_prefix": "Look for: ", "visual_prompt_prefix": "<|vision_start|><|image_pad|><|vision_end|>Page."}
    edit_json(folder / "processor_config.json", **words)
    model = loaded(folder)
    (page,) = read(model, EmbedRequest(inputs=(Image(WIDE),), outputs=MULTI))
    assert page.payload.ids == oracle.page_tokens(folder, WIDE)
    (query,) = read(model, EmbedRequest(inputs=(TextInput("x"),), outputs=MULTI, prompt_name="query"))
    assert query.payload.ids == oracle.query_tokens(folder, "x")


def test_words_around_a_page_must_have_a_place_for_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied("colqwen2", tiny_folder, tmp_path)
    edit_json(folder / "processor_config.json", visual_prompt_prefix="Describe the image.")
    with pytest.raises(ConfigError, match="visual_prompt_prefix must have one"):
        loaded(folder)


def _in_one(config: dict[str, Any]) -> dict[str, Any]:
    """As the first folders of the family have it: settings of the language model beside all others."""
    text = config.pop("text_config")
    del text["model_type"], text["layer_types"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision = {"in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_vl"}
    return {**text, **config, "vision_config": {**config["vision_config"], **vision}}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2-vl", {}),
        ("qwen2-vl", {"visual.": "model.visual.", "model.": "model.language_model."}),
        ("qwen2-vl", {"lm_head.": None}),
        ("colqwen2", {"vlm.": "vlm.model."}),
        ("colpali", {"vlm.vision_tower.": "vlm.vision_tower.vision_model."}),
    ],
    ids=["config-in-one", "inner-model", "no-answers", "inner-model-of-pages", "inner-image-encoder"],
)
def test_folders_of_other_versions_give_the_same(
    kind: str, names: dict[str, str | None], tiny_folder: TinyFolder, tmp_path: Path, load: Load
) -> None:
    folder = copied(kind, tiny_folder, tmp_path)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        start = next((start for start in names if name.startswith(start)), "")
        if (instead := names.get(start, start)) is not None:
            weights[instead + name.removeprefix(start)] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if not names:
        path = folder / "config.json"
        path.write_text(json.dumps(_in_one(json.loads(path.read_text()))))
    model = load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact"))
    assert apart(_answers(model, kind), _answers(load(kind), kind)) < EXACT / 4


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen2.5-vl", {"architectures": ["ColQwen2_5"]}, r"must have custom_text_proj\.weight in its weights"),
        (
            "qwen2-vl",
            {"model_type": "paligemma"},
            "model_type='paligemma' .* reads images in a way",
        ),
    ],
)
def test_models_that_are_shown_images_in_other_ways_are_rejected(
    kind: str, changes: dict[str, Any], reason: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = copied(kind, tiny_folder, tmp_path)
    (folder / "modules.json").unlink()
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=reason):
        read_folder(folder)


def test_wrong_image_positions_are_found_out(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load compares them: here, positions counted as those of words."""

    def as_words(sequence: TokenSequence, *_: object) -> Any:
        return np.tile(np.arange(len(sequence.ids)), (3, 1))

    monkeypatch.setattr("staged_pool.runtime.models.vision.image_embedder.grid_positions", as_words)
    with pytest.raises(ConfigError, match="gives other vectors for an image between words"):
        loaded(tiny_folder("qwen2-vl"))


@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_the_card_names_the_class_and_counts_all_parameters(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    stored = load_file(tiny_folder(kind) / "model.safetensors")
    own = sum(weight.numel() for name, weight in stored.items() if not name.startswith("lm_head"))
    card = load(kind).card
    assert card.parameters == own
    assert [card.architecture] == json.loads((tiny_folder(kind) / "config.json").read_text())["architectures"]
