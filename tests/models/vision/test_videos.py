"""Conversations with videos have the vectors of transformers' parts, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.input_preparer import load_preparer
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.remote.arrays import Block, pack_payload, unpack_payload
from staged_pool.runtime.remote.limits import PayloadLimits
from staged_pool.runtime.requests import DENSE_ONLY, Chat, EmbedRequest, Image, ScoreRequest, TextInput, Video
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import InvalidInput, TooLarge, Unsupported, UnusableMedia
from staged_pool.stages.work import Prepared, Request
from tests.models import image_oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode as encode_image
from tests.models.tiny import SEEING
from tests.models.videos import conversation_oracle as oracle
from tests.models.videos import files
from tests.models.videos.conversation_oracle import Array, Moving, Still

EXACT = 1e-4
"""At float32."""

SIZE = (90, 120)
CLIP = files.encode(files.shots(9, *SIZE), keys=4)
"""Nine frames of 0.1 s."""
SLOW = files.encode(files.shots(6, *SIZE), rate=1)
"""Six frames of a second each."""
STILL = encode_image(100, 80, "PNG", 0)
Load: TypeAlias = Callable[..., Encoder]


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    """Load a tiny model in float32 with exact images, once for each settings."""
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str, **settings: Any) -> Encoder:
        usual: dict[str, Any] = {"dtype": "float32", "image_path": "exact", "attention": "packed", "image_cache_mb": 50}
        config = EngineConfig(model=str(tiny_folder(kind)), **(usual | settings))
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def said(*parts: str | Image) -> TextInput:
    return TextInput(Chat(({"role": "user", "content": parts},)), add_special_tokens=False)


def prepared(model: Encoder, given: TextInput | Image) -> Prepared[Any]:
    (found,) = model.preprocess([ModelInput(given, DENSE_ONLY)])
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Prepared)
    return found


def vectors(model: Encoder, *inputs: TextInput | Image, alone: bool = False) -> list[Array]:
    payloads = [prepared(model, given).payload for given in inputs]
    batches = [[payload] for payload in payloads] if alone else [payloads]
    rows = [row for batch in batches for row in model.forward(batch)]
    request = EmbedRequest(inputs=inputs)
    assert all(isinstance(row, Row) for row in rows)
    found = plan(request, model.card).finish(rows, 0)
    return list(found.dense)  # type: ignore[attr-defined]


def moving(data: bytes, indices: list[int], rate: float) -> Moving:
    frames = oracle.decode(data)
    return Moving([frames[index] for index in indices], rate)


CLIP_CHOSEN = moving(CLIP, [0, 2, 4, 6], 10 * 4 / 9)
"""Four of nine frames, the fewest: the clip has less than a second."""
SLOW_CHOSEN = moving(SLOW, [0, 1, 2, 3, 4, 5], 1.0)
CASES: dict[str, tuple[tuple[str | Image, ...], tuple[oracle.Part, ...]]] = {
    "a clip": ((Video(CLIP), "What is this?"), (CLIP_CHOSEN, "What is this?")),
    "a slow clip": (("first", Video(SLOW), "and then?"), ("first", SLOW_CHOSEN, "and then?")),
    "a clip and an image": (
        (Video(SLOW), "and", Image(STILL), "and", Video(CLIP)),
        (SLOW_CHOSEN, "and", Still(STILL), "and", CLIP_CHOSEN),
    ),
    "an image before a clip": ((Image(STILL), Video(CLIP), "?"), (Still(STILL), CLIP_CHOSEN, "?")),
    "an odd number of frames": (
        (Video(SLOW, {"do_sample_frames": False}), Video(files.encode(files.shots(3, *SIZE)), {"num_frames": -1})),
        (SLOW_CHOSEN, moving(files.encode(files.shots(3, *SIZE)), [0, 1, 2], 10.0)),
    ),
    "frames by their number": (
        (Video(SLOW, {"num_frames": 2}), "x"),
        (moving(SLOW, [0, 3], 2 / 6), "x"),
    ),
}


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", SEEING)
def test_conversations_with_videos_have_the_oracles_vectors(
    kind: str, attention: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, folder = load(kind, attention=attention), tiny_folder(kind)
    assert model.card.reads_videos
    given = [said(*parts) for parts, _ in CASES.values()]
    wanted = [oracle.conversation(folder, parts) for _, parts in CASES.values()]
    text = said("no image and no video")
    for alone in (False, True):
        found = vectors(model, *given, alone=alone)
        apart = {name: float(np.abs(f - w).max()) for name, f, w in zip(CASES, found, wanted, strict=True)}
        assert max(apart.values()) < EXACT, apart
    (word,) = vectors(model, text)
    assert np.abs(word - oracle.conversation(folder, ["no image and no video"])).max() < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_the_oracle_tells_time_order_and_rate_apart(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    frames = SLOW_CHOSEN.frames
    given: list[tuple[oracle.Part, ...]] = [
        (SLOW_CHOSEN, "?"),
        (Moving(frames[::-1], 1.0), "?"),
        (Moving(frames[:4], 1.0), "?"),
        ("?", SLOW_CHOSEN),
    ]
    if kind == "qwen2.5-vl":
        given.append((Moving(frames, 2.0), "?"))
    found = [oracle.conversation(folder, parts) for parts in given]
    assert min(float(np.abs(found[0] - other).max()) for other in found[1:]) > 50 * EXACT
    faster = oracle.conversation(folder, (Moving(frames, 2.0), "?"))
    assert (float(np.abs(found[0] - faster).max()) > EXACT) == (kind == "qwen2.5-vl")


@pytest.mark.parametrize("kind", SEEING)
def test_a_video_alone_is_a_message_of_it(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    (found,) = vectors(load(kind), Video(CLIP))
    assert np.abs(found - oracle.conversation(tiny_folder(kind), [CLIP_CHOSEN])).max() < EXACT


def test_a_turned_video_is_upright(tiny_folder: TinyFolder, load: Load) -> None:
    (found,) = vectors(load("qwen2-vl"), Video(files.turned(CLIP, 90)))
    upright = [np.ascontiguousarray(np.rot90(frame, 3)) for frame in CLIP_CHOSEN.frames]
    assert np.abs(found - oracle.conversation(tiny_folder("qwen2-vl"), [Moving(upright, 1.0)])).max() < EXACT


@pytest.mark.parametrize("kind", SEEING)
def test_ready_frames_are_read_as_they_are(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    files_of = [encode_image(*SIZE[::-1], "PNG", seed) for seed in range(3)]
    shots = [np.array(image_oracle.open_rgb(data)) for data in files_of]
    for fps in (None, 0.5):
        (found,) = vectors(load(kind), Video.of_frames(files_of, fps=fps))
        wanted = oracle.conversation(tiny_folder(kind), [Moving(shots, fps or 2.0)])
        assert np.abs(found - wanted).max() < EXACT
    with pytest.raises(UnusableMedia, match="Frame 2 of 2: "):
        vectors(load(kind), Video.of_frames([files_of[0], files_of[1][:50]]))


def test_videos_that_are_only_tokenized_have_their_tokens(load: Load) -> None:
    model = load("qwen2-vl")
    for parts, _ in CASES.values():
        given = said(*parts)
        assert isinstance(given.source, Chat)
        found = model.tokenize(given.source, add_special_tokens=False)
        assert found.ids == prepared(model, given).payload.ids
        assert "<|video_pad|>" in found.strings


def test_a_front_prepares_videos_as_the_model_does(load: Load) -> None:
    model = load("qwen2.5-vl")
    front = load_preparer(EngineConfig(model="unused"), model.card, model.preparation)
    given = ModelInput(said(Video(SLOW), "?"), DENSE_ONLY)
    (theirs,) = front.preprocess([given])
    assert isinstance(theirs, Prepared)
    ours = prepared(model, said(Video(SLOW), "?")).payload
    parts: list[Any] = []
    packed = pack_payload(theirs.payload, parts)
    limits = PayloadLimits.of(given.lane, model.card, model.preparation)
    for got in (theirs.payload, unpack_payload(packed, Block(b"".join(parts)), limits)):
        assert isinstance(got, TokenSequence)
        assert got.ids == ours.ids
        assert [(each.grid, each.steps, each.step_s) for each in got.images] == [
            (each.grid, each.steps, each.step_s) for each in ours.images
        ]
        assert np.array_equal(got.images[0].values, ours.images[0].values)


def test_prepared_videos_are_cached_by_content_and_options(load: Load) -> None:
    model = load("qwen2-vl")
    model.clear_image_cache()
    assert model.image_cache is not None
    hits, misses = model.image_cache.hits, model.image_cache.misses
    counted = []
    for options in ({}, {"fps": 2.0}, {"num_frames": 2}, {"max_pixels": 6 * 28 * 28}, {"max_duration": 1.0}):
        for _ in range(2):
            prepared(model, Video(SLOW, options))
        counted.append((model.image_cache.hits - hits, model.image_cache.misses - misses))
    assert counted == [(1, 1), (3, 1), (4, 2), (5, 3), (6, 4)]  # fps=2 is the model's own


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_frames": 0}, "num_frames must be a whole number from 1 to 768"),
        ({"fps": -1}, "fps is -1, which chooses nothing: give num_frames, too"),
        ({"fps": -2, "num_frames": 4}, "fps must be a number above 0"),
        ({"max_duration": "long"}, "max_duration must be a number above 0"),
        ({"max_pixels": 10**9}, "max_pixels must be a whole number from 1 to 31360"),
        ({"do_sample_frames": 1}, "do_sample_frames must be true or false"),
        ({"size": {"height": 1}}, "size must be an object with shortest_edge and longest_edge"),
        ({"speed": 2}, "'speed' is not known: this model knows num_frames, fps"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str, load: Load) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        prepared(load("qwen2-vl"), Video(SLOW, options))
    assert caught.value.param == "media_io_kwargs"


def test_a_video_of_too_many_tokens_is_rejected_before_it_is_decoded(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen2-vl")
    monkeypatch.setattr("staged_pool.runtime.models.videos.decode.Clip.read", None)
    with pytest.raises(InvalidInput, match=r"takes \d+ tokens, 64 frames of .* at most 320.*num_frames"):
        prepared(model, Video(files.encode(files.shots(64, *SIZE), rate=1)))
    with pytest.raises(TooLarge, match="at most 768 are"):
        prepared(model, Video(files.encode(files.shots(769, 2, 2)), {"num_frames": -1}))


def test_errors_say_which_video(load: Load) -> None:
    with pytest.raises(InvalidInput, match=r"^Video 2 of 2: .*no known format") as caught:
        prepared(load("qwen2-vl"), said(Image(STILL), Video(b"no video")))
    assert caught.value.param == "messages"
    with pytest.raises(InvalidInput, match="writes 2 video tokens: no text may contain the video token"):
        prepared(load("qwen2-vl"), said(Video(CLIP), "<|video_pad|>"))


@pytest.mark.parametrize("kind", ["colqwen2", "jina-m0"])
def test_a_model_that_reads_no_videos_says_so(kind: str, load: Load) -> None:
    model = load(kind)
    assert not model.card.reads_videos
    request: Request = EmbedRequest(inputs=(Video(CLIP),), outputs=frozenset(model.card.outputs))
    if kind == "jina-m0":
        request = ScoreRequest(queries=("a cat",), documents=(Video(CLIP),))
    with pytest.raises(Unsupported, match=r"reads no videos\."):
        plan(request, model.card)
