"""Qwen3-VL-Embedding gives transformers' vectors of its authors' prompts, alone and together."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from safetensors import safe_open

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.vision_language import VisionLanguageTower
from staged_pool.runtime.models.vision.image_layout import grid_positions, image_token_places
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.models import qwen3_vl_oracle as oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, Part
from tests.models.requests import prepare, score
from tests.models.tiny import edit_json
from tests.models.tiny.vision_language import QWEN3_LONGEST

Load: TypeAlias = Callable[..., Encoder]

EXACT = 1e-4
WIDE, TALL, TINY = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3)
INPUTS: list[list[Part]] = [
    ["a text"],
    ["  blanks and\n\nlines stay \n"],
    [""],
    [WIDE],
    [TINY],
    [TALL, "words after it"],
    ["words before ", WIDE, " and between", TALL],
]
INSTRUCTIONS = ["", "Find a page about it", "Is it  ? "]


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str = "qwen3-vl", **settings: Any) -> Encoder:
        config = EngineConfig(model=str(tiny_folder(kind)), dtype="float32", **({"image_path": "exact"} | settings))
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def source(parts: Sequence[Part]) -> TextInput | Image:
    match parts:
        case [str(text)]:
            return TextInput(text)
        case [bytes(image)]:
            return Image(image)
    content = tuple(Image(part) if isinstance(part, bytes) else part for part in parts)
    return TextInput(Chat(({"role": "user", "content": content},)), add_special_tokens=False)


def dense(model: Encoder, inputs: Sequence[Sequence[Part]], *, alone: bool = False, **others: Any) -> Array:
    """Return the vectors of inputs, in shared batches or each alone."""
    request = EmbedRequest(inputs=tuple(map(source, inputs)), **others)
    prepared = prepare(model, request)
    rows: dict[int, Any] = {}
    for _, group in itertools.groupby(
        sorted(range(len(prepared)), key=lambda at: str(prepared[at].batch_key)),
        lambda at: at if alone else prepared[at].batch_key,
    ):
        places = [*group]
        found = model.forward([prepared[at].payload for at in places])
        rows |= zip(places, found, strict=True)
    result = plan(request, model.card).finish([rows[at] for at in range(len(rows))], 1)
    assert isinstance(result, EmbedResult)
    assert result.dense is not None
    return result.dense


def sequence(model: Encoder, given: TextInput | Image, **others: Any) -> TokenSequence:
    (prepared,) = prepare(model, EmbedRequest(inputs=(given,), **others))
    assert isinstance(prepared.payload, TokenSequence)
    return prepared.payload


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_texts_images_and_both_have_the_oracles_vectors(attention: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(attention=attention), tiny_folder("qwen3-vl")
    assert model.card.attention == attention
    for prompt in INSTRUCTIONS:
        wanted = np.array([oracle.embed(folder, parts, prompt) for parts in INPUTS])
        assert np.abs(dense(model, INPUTS, prompt=prompt) - wanted).max() < EXACT
    assert np.abs(dense(model, INPUTS, alone=True) - dense(model, INPUTS)).max() < EXACT / 4


def test_the_oracle_tells_inputs_and_the_layers_that_see_images_apart(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("qwen3-vl")
    found = [oracle.embed(folder, parts) for parts in INPUTS]
    found += [oracle.embed(folder, INPUTS[3], prompt) for prompt in INSTRUCTIONS[1:]]
    assert min(float(np.abs(a - b).max()) for a, b in itertools.combinations(found, 2)) > 100 * EXACT
    ids, given = oracle.tokens(folder, oracle.embedding_prompt([WIDE, "x"]), [WIDE], oracle.PIXELS)
    with_them, without = (oracle.last_hidden(folder, ids, given, deepstack=there) for there in (True, False))
    assert float((with_them - without)[-1].abs().max()) > 100 * EXACT


@pytest.mark.parametrize("place", ["rows", "packed_transformer"])
def test_a_forward_without_the_inner_layers_images_is_found_out(
    place: str, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at load compare it: in rows with transformers, packed with rows."""
    monkeypatch.setattr(f"staged_pool.runtime.models.transformer.{place}.deepstack", lambda _: {})
    with pytest.raises(ConfigError, match=r"gives other vectors (for an image between words|on a packed batch)"):
        load_model(EngineConfig(model=str(tiny_folder("qwen3-vl")), dtype="float32", attention="packed"))


def test_names_of_weights_are_those_of_the_repository(tiny_folder: TinyFolder) -> None:
    with safe_open(tiny_folder("qwen3-vl") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "model.visual.deepstack_merger_list.1.linear_fc2.weight",
        "model.visual.pos_embed.weight",
    } <= names


def test_positions_and_tokens_are_the_oracles(tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(), tiny_folder("qwen3-vl")
    tower = model.towers["image"]
    assert isinstance(tower, VisionLanguageTower)
    layout = tower.image_embedder.layout
    for parts in INPUTS[3:]:
        found = sequence(model, source(parts))
        images = [part for part in parts if isinstance(part, bytes)]
        ids, given = oracle.tokens(folder, oracle.embedding_prompt(parts), images, oracle.PIXELS)
        assert found.ids == ids[0].tolist()
        wanted, _ = oracle.body(folder).get_rope_index(ids, given["mm_token_type_ids"], given["image_grid_thw"])
        assert np.array_equal(grid_positions(found, image_token_places(found, layout), layout), wanted[:, 0].numpy())


def test_messages_of_a_client_give_the_same_tokens(load: Load) -> None:
    """With the system message and the open answer of the authors' examples, or without."""
    model = load()
    user = {"role": "user", "content": (Image(WIDE), "a page")}
    system, answer = {"role": "system", "content": "Represent the user's input."}, {"role": "assistant", "content": ""}
    chats = [
        Chat((user,)),
        Chat((user,), add_generation_prompt=True),
        Chat((system, user), add_generation_prompt=True),
        Chat(({**system, "content": (system["content"],)}, user)),
        Chat((system, user, answer), continue_final_message=True),
    ]
    found = [sequence(model, TextInput(chat, add_special_tokens=False)).ids for chat in chats]
    assert found.count(found[0]) == len(chats)
    other = Chat(({**system, "content": "Find it."}, user))
    assert sequence(model, TextInput(other, add_special_tokens=False)).ids != found[0]
    own = sequence(model, TextInput(other, add_special_tokens=False), prompt="Something else.").ids
    assert own == sequence(model, TextInput(other, add_special_tokens=False)).ids


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("with_image", [False, True])
def test_cutting_leaves_the_system_message_and_the_open_answer(
    with_image: bool, side: Any, tiny_folder: TinyFolder, load: Load
) -> None:
    model, words = load(), "many different words " * 30
    parts: list[Part] = [words]
    if with_image:
        parts = [TINY, words] if side == "right" else [words, TINY]
    prompt = oracle.embedding_prompt(parts)
    whole = oracle.tokens(tiny_folder("qwen3-vl"), prompt, [TINY] if with_image else [], oracle.PIXELS)[0][0].tolist()
    head = oracle.tokens(tiny_folder("qwen3-vl"), prompt.partition("user\n")[0] + "user\n", [], None)[0].shape[1]
    tail = len(model.tokenize("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids)
    given = source(parts)
    assert isinstance(given, TextInput)
    for limit in (len(whole) - 1, 60, len(whole), len(whole) + 1):
        cut = sequence(model, TextInput(given.source, limit, side, add_special_tokens=not with_image)).ids
        gone = max(len(whole) - limit, 0)
        if side == "right":
            assert cut == whole[: len(whole) - tail - gone] + whole[-tail:]
        else:
            assert cut == whole[:head] + whole[head + gone :]
    if side == "right":
        own = TextInput(given.source, max_own_tokens=len(whole) - head - tail - 7)
        assert sequence(model, own).ids == whole[: len(whole) - tail - 7] + whole[-tail:]


def test_a_cut_through_an_image_and_a_text_beyond_the_limit_are_rejected(load: Load) -> None:
    with pytest.raises(InvalidInput, match="would cut an image"):
        sequence(load(), TextInput(Chat(({"role": "user", "content": ("x", Image(WIDE))},)), 20))
    with pytest.raises(InvalidInput, match=f"maximum context length is {QWEN3_LONGEST} tokens"):
        sequence(load(), TextInput("word " * QWEN3_LONGEST))
    longest = sequence(load(), TextInput("word " * QWEN3_LONGEST, -1))
    assert len(longest.ids) == QWEN3_LONGEST


@pytest.mark.parametrize("path", ["fast", "exact"])
def test_images_keep_to_the_pixels_of_the_authors_script(path: str, tiny_folder: TinyFolder, load: Load) -> None:
    """The folder's own limits are wider: 65,536 to 16,777,216."""
    images = load(image_path=path).images
    assert images is not None
    assert (images.settings.min_pixels, images.settings.max_pixels) == (4 * 32**2, 1800 * 32**2)
    assert images.patches(Image(TINY)) == images.read(Image(TINY)).patches == 4 * 6  # by the folder: at least 256
    if path == "fast":
        assert 1700 * 4 < (images.patches(Image(encode(3000, 2000, "PNG"))) or 0) <= 1800 * 4


def test_a_folder_of_sentence_transformers_says_itself_what_is_written(tiny_folder: TinyFolder, load: Load) -> None:
    """No system message without a prompt, no full stop, and images as the processor says."""
    model, folder = load("qwen3-vl-modules"), tiny_folder("qwen3-vl-modules")

    def written(content: str, system: str = "") -> str:
        before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        return f"{before}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"

    assert sequence(model, TextInput("")).ids == oracle.tokens(folder, written(""), [], None)[0][0].tolist()
    for name, system in (("query", "Find pages about it"), ("document", "Represent the user's input."), (None, "")):
        wanted = [
            oracle.vector(folder, written("a text", system), [], None),
            oracle.vector(folder, written(oracle.IMAGE, system), [WIDE], None),
            oracle.vector(folder, written(f"{oracle.IMAGE}both", system), [WIDE], None),
        ]
        found = dense(model, [["a text"], [WIDE], [WIDE, "both"]], prompt_name=name)
        assert np.abs(found - np.array(wanted)).max() < EXACT
    scores = score(model, "a query", [Image(WIDE)]).scores
    query = oracle.vector(folder, written("a query", "Find pages about it"), [], None)
    page = oracle.vector(folder, written(oracle.IMAGE, "Represent the user's input."), [WIDE], None)
    assert abs(scores[0] - query @ page) < EXACT


def test_scores_compare_texts_with_images(tiny_folder: TinyFolder, load: Load) -> None:
    folder = tiny_folder("qwen3-vl")
    found = score(load(), "a query", ["a text", Image(WIDE)]).scores
    wanted = [oracle.embed(folder, parts) @ oracle.embed(folder, ["a query"]) for parts in (["a text"], [WIDE])]
    assert np.abs(found - np.array(wanted)).max() < EXACT


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"processing_kwargs": {"image": {"max_pixels": 9}}}, "processing_kwargs: image is not supported"),
        ({"processing_kwargs": {"chat_template": {"tools": []}}}, "chat_template: tools is not supported"),
        ({"modality_config": {"message": {"method": "generate"}}}, "modality_config: message is not supported"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name='sentence_embedding' is not supported"),
    ],
)
def test_settings_of_other_inputs_are_rejected(
    changes: dict[str, Any], reason: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("qwen3-vl-modules"), tmp_path / "model"))
    edit_json(folder / "sentence_bert_config.json", **changes)
    with pytest.raises(ConfigError, match=reason):
        read_folder(folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ messages[-1]['content'] | trim }}", "does not write the text of a message as it is"),
        ("{{ raise_exception('no') }}", "does not accept a message of one text"),
    ],
)
def test_a_chat_template_that_does_not_fit_is_rejected(
    template: str | None, reason: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("qwen3-vl"), tmp_path / "model"))
    path = folder / "chat_template.jinja"
    path.unlink()
    if template is not None:
        path.write_text(template)
    with pytest.raises(ConfigError, match=reason):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
