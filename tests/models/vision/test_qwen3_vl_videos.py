"""Qwen3-VL reads videos by transformers' rules: a step is an image behind its time, in conversations and pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.input_preparer import load_preparer
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.vision_language import VisionLanguageTower
from staged_pool.runtime.models.vision.image_layout import grid_positions, image_token_places
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.remote.arrays import Block, pack_payload, unpack_payload
from staged_pool.runtime.remote.limits import PayloadLimits
from staged_pool.runtime.requests import Chat, Content, EmbedRequest, Image, Output, ScoreRequest, TextInput, Video
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import InvalidInput
from tests.models import qwen3_vl_oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array
from tests.models.requests import prepare, score
from tests.models.videos import files
from tests.models.videos import steps_oracle as oracle
from tests.models.videos.steps_oracle import Moving, Seen
from tests.models.vision.test_qwen3_vl_reranker import PIXELS, prompt, whole

Load: TypeAlias = Callable[..., Encoder]
Part: TypeAlias = str | Seen

EXACT = 1e-4
"""At float32."""

SHORT = Moving(files.encode(files.shots(9, 90, 120), keys=4), 10.0)
"""Nine frames of 0.1 s, of which four are read."""
SLOW = Moving(files.encode(files.shots(6, 90, 120), rate=1), 1.0)
"""Six frames of a second each, resized to fewer pixels."""
ODD = Moving(files.encode(files.shots(5, 40, 64), rate=3), 3.0, {"do_sample_frames": False})
STILL = encode(100, 80)
INPUTS: list[list[Part]] = [
    [SHORT],
    [SLOW, "words after it"],
    ["words before:", SLOW, ": and between", ODD],
    [ODD, STILL, "both", SHORT],
    [Moving(SLOW.data, 1.0, {"num_frames": 3}), "three"],
    ["no video"],
    [STILL],
]


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str = "qwen3-vl", **settings: Any) -> Encoder:
        given = {"dtype": "float32", "image_path": "exact"} | settings
        config = EngineConfig(model=str(tiny_folder(kind)), **given)
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def shown(parts: Sequence[Part]) -> list[Seen]:
    return [part for part in parts if not isinstance(part, str)]


def sent(part: Part) -> str | Image:
    if isinstance(part, Moving):
        return Video(part.data, part.options)
    return Image(part) if isinstance(part, bytes) else part


def chat(parts: Sequence[Part]) -> Chat:
    return Chat(({"role": "user", "content": tuple(map(sent, parts))},))


def dense(model: Encoder, inputs: Sequence[Sequence[Part]], *, alone: bool = False, **others: Any) -> Array:
    """Return vectors of inputs, in shared batches or each alone."""
    given = tuple(TextInput(chat(parts), add_special_tokens=False) for parts in inputs)
    request = EmbedRequest(inputs=given, **others)
    prepared = prepare(model, request)
    batches: dict[object, list[int]] = {}
    for place, one in enumerate(prepared):
        batches.setdefault(place if alone else one.batch_key, []).append(place)
    rows: dict[int, Any] = {}
    for places in batches.values():
        rows |= zip(places, model.forward([prepared[place].payload for place in places]), strict=True)
    result = plan(request, model.card).finish([rows[place] for place in range(len(rows))], 1)
    assert isinstance(result, EmbedResult)
    assert result.dense is not None
    return result.dense


def inputs_of(folder: Path, parts: Sequence[Part], instruction: str = "") -> tuple[Any, dict[str, Any]]:
    written = qwen3_vl_oracle.embedding_prompt([oracle.written(parts)], instruction)
    return oracle.tokens(folder, written, shown(parts), qwen3_vl_oracle.PIXELS)


def wanted_vector(folder: Path, parts: Sequence[Part], instruction: str = "") -> Array:
    hidden = qwen3_vl_oracle.last_hidden(folder, *inputs_of(folder, parts, instruction))
    found: Array = torch.nn.functional.normalize(hidden[-1], dim=-1).numpy()
    return found


def sequence(model: Encoder, parts: Sequence[Part], **limits: Any) -> TokenSequence:
    (prepared,) = prepare(model, EmbedRequest(inputs=(TextInput(chat(parts), add_special_tokens=False, **limits),)))
    assert isinstance(prepared.payload, TokenSequence)
    return prepared.payload


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_conversations_with_videos_have_the_oracles_vectors(
    attention: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, folder = load(attention=attention), tiny_folder("qwen3-vl")
    assert model.card.reads_videos
    for instruction in ("", "Find it"):
        wanted = np.array([wanted_vector(folder, parts, instruction) for parts in INPUTS])
        for alone in (False, True):
            apart = np.abs(dense(model, INPUTS, alone=alone, prompt=instruction) - wanted).max(axis=1)
            assert apart.max() < EXACT, apart


def test_the_oracle_tells_order_times_and_frames_apart(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("qwen3-vl")
    given: list[list[Part]] = [
        [SLOW, "?"],
        [Moving(SLOW.data, 1.0, turned=True), "?"],
        [Moving(SLOW.data, 2.0, {"do_sample_frames": False}), "?"],
        [Moving(SLOW.data, 1.0, {"num_frames": 4}), "?"],
        ["?", SLOW],
    ]
    found = [wanted_vector(folder, parts) for parts in given]
    assert min(float(np.abs(a - b).max()) for a, b in itertools.combinations(found, 2)) > 50 * EXACT


def test_tokens_and_positions_are_the_oracles(tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(), tiny_folder("qwen3-vl")
    tower = model.towers["image"]
    assert isinstance(tower, VisionLanguageTower)
    layout = tower.image_embedder.layout
    for parts in INPUTS[:5]:
        found = sequence(model, parts)
        ids, given = inputs_of(folder, parts)
        assert found.ids == ids[0].tolist()
        grids = given.get("image_grid_thw"), given["video_grid_thw"]
        wanted, _ = qwen3_vl_oracle.body(folder).get_rope_index(ids, given["mm_token_type_ids"], *grids)
        assert np.array_equal(grid_positions(found, image_token_places(found, layout), layout), wanted[:, 0].numpy())
        assert model.tokenize(chat(parts), add_special_tokens=False).ids == found.ids


def test_each_step_has_its_time(load: Load) -> None:
    model = load()
    text = model.detokenize(sequence(model, [SHORT]).ids, skip_special_tokens=False)
    # Frames 0, 3, 5 and 8 of ten a second: 0.15 s and 0.65 s.
    assert [piece.partition(" seconds>")[0] for piece in text.split("<")[1:] if " seconds>" in piece] == ["0.1", "0.7"]
    frames = [encode(64, 48, "PNG", seed) for seed in range(4)]
    request = EmbedRequest(inputs=(Video.of_frames(frames, fps=0.5),))
    payload = prepare(model, request)[0].payload
    assert isinstance(payload, TokenSequence)
    text = model.detokenize(payload.ids, skip_special_tokens=False)
    assert "<1.0 seconds>" in text
    assert "<5.0 seconds>" in text


def test_a_front_prepares_videos_as_the_model_does(load: Load) -> None:
    model = load()
    sent = msgspec.msgpack.encode(model.preparation)
    front = load_preparer(
        EngineConfig(model="unused"), model.card, msgspec.msgpack.decode(sent, type=type(model.preparation))
    )
    (theirs,) = prepare(front, EmbedRequest(inputs=(Video(SLOW.data),)))  # type: ignore[arg-type]
    (ours,) = prepare(model, EmbedRequest(inputs=(Video(SLOW.data),)))
    assert isinstance(theirs.payload, TokenSequence)
    assert isinstance(ours.payload, TokenSequence)
    assert theirs.payload.ids == ours.payload.ids
    parts: list[Any] = []
    packed = pack_payload(theirs.payload, parts)
    vectors = []
    limits = PayloadLimits.of("image", model.card, model.preparation)
    for payload in (unpack_payload(packed, Block(b"".join(parts)), limits), ours.payload):
        (row,) = model.forward([payload])
        assert isinstance(row, Row)
        vector = row.values[Output.DENSE]
        assert isinstance(vector, np.ndarray)
        vectors.append(vector)
    assert np.array_equal(vectors[0], vectors[1])


def test_a_folder_of_sentence_transformers_reads_videos(tiny_folder: TinyFolder, load: Load) -> None:
    folder = tiny_folder("qwen3-vl-modules")
    written = f"<|im_start|>user\n{oracle.VIDEO}and<|im_end|>\n<|im_start|>assistant\n"
    hidden = qwen3_vl_oracle.last_hidden(folder, *oracle.tokens(folder, written, [SLOW], None))
    wanted = torch.nn.functional.normalize(hidden[-1], dim=-1).numpy()
    found = dense(load("qwen3-vl-modules"), [[SLOW, "and"]])
    assert np.abs(found - wanted).max() < EXACT


def test_a_conversation_is_not_cut_inside_a_video(load: Load) -> None:
    model = load()
    whole_ids = sequence(model, ["many words " * 9, SLOW]).ids
    assert sequence(model, [SLOW, "many words " * 9], max_tokens=len(whole_ids) - 9).ids[-1] == whole_ids[-1]
    with pytest.raises(InvalidInput, match="would cut an image"):
        sequence(model, ["many words " * 9, SLOW], max_tokens=len(whole_ids) - 15)
    with pytest.raises(InvalidInput, match="no text may contain the video token"):
        sequence(model, [SLOW, "<|video_pad|>"])
    with pytest.raises(InvalidInput, match=r"max_pixels must be a whole number from 1 to 65536"):
        sequence(model, [Moving(SLOW.data, 1.0, {"max_pixels": 10**6})])


PAIRS: list[tuple[list[Part], list[Part]]] = [
    (["a query"], [SLOW]),
    ([SHORT], ["a document"]),
    (["like this:", SHORT], [SLOW, "with words ", STILL]),
    ([STILL], [ODD, SHORT]),
]


def content(parts: Sequence[Part]) -> Content:
    match parts:
        case [str(text)]:
            return text
        case [one] if not isinstance(one, str):
            found = sent(one)
            assert isinstance(found, Image)
            return found
    return chat(parts)


def wanted_score(folder: Path, written: str, seen: Sequence[Seen], size: dict[str, int] | None) -> float:
    ids, given = oracle.tokens(folder, written, seen, size)
    with torch.inference_mode():
        logits = whole(folder)(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, -1]
    yes, no = qwen3_vl_oracle.tokenizer_of(folder).convert_tokens_to_ids(["yes", "no"])
    return float(torch.sigmoid(logits[yes] - logits[no]))


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_pairs_with_videos_have_the_oracles_scores(attention: str, tiny_folder: TinyFolder, load: Load) -> None:
    folder, model = tiny_folder("qwen3-vl-reranker"), load("qwen3-vl-reranker", attention=attention)
    assert model.card.reads_videos
    wanted = []
    for query, document in PAIRS:
        text = prompt([oracle.written(query)], [oracle.written(document)])
        wanted.append(wanted_score(folder, text, shown([*query, *document]), PIXELS))
        found = score(model, content(query), [content(document)]).scores[0]
        assert abs(found - wanted[-1]) < EXACT
    query = PAIRS[0][0]
    documents = [document for _, document in PAIRS]
    together = score(model, content(query), [content(document) for document in documents]).scores
    for found, document in zip(together, documents, strict=True):
        text = prompt([oracle.written(query)], [oracle.written(document)])
        assert abs(found - wanted_score(folder, text, shown(document), PIXELS)) < EXACT
    assert np.ptp(together) > 50 * EXACT


@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_documents_words_are_cut_beside_a_video(side: Any, tiny_folder: TinyFolder, load: Load) -> None:
    words = "many different words " * 20
    document: list[Part] = [SLOW, words] if side == "right" else [words, SLOW]
    folder, model = tiny_folder("qwen3-vl-reranker"), load("qwen3-vl-reranker")
    text = prompt([oracle.written([SHORT])], [oracle.written(document)])
    ids = oracle.tokens(folder, text, shown([SHORT, *document]), PIXELS)[0][0].tolist()
    tail = len(model.tokenize("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids)
    before = text.partition("<Document>:")
    head = oracle.tokens(folder, before[0] + before[1], [SHORT], PIXELS)[0].shape[1]
    request = ScoreRequest(
        queries=(content([SHORT]),), documents=(content(document),), max_tokens=len(ids) - 20, truncate_side=side
    )
    (prepared,) = prepare(model, request)
    assert isinstance(prepared.payload, TokenSequence)
    if side == "right":
        assert prepared.payload.ids == ids[: len(ids) - tail - 20] + ids[-tail:]
    else:
        assert prepared.payload.ids == ids[:head] + ids[head + 20 :]


def test_a_cross_encoder_folder_writes_videos_by_its_template(tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load("qwen3-vl-cross-encoder"), tiny_folder("qwen3-vl-cross-encoder")
    query, document = PAIRS[2]
    before = prompt([oracle.written(query)], [oracle.written(document)]).partition("<|im_end|>\n")[2]
    written = f"<|im_start|>system\nJudge.<|im_end|>\n{before}"
    found = score(model, content(query), [content(document)]).scores[0]
    assert abs(found - wanted_score(folder, written, shown([*query, *document]), None)) < EXACT
