"""Videos in every place where clients put them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from staged_pool.api.wire.dialects import openai, pooling, score, voyage
from staged_pool.api.wire.exchange import Exchange, Read
from staged_pool.api.wire.forms import read_form
from staged_pool.api.wire.image_count import count_images
from staged_pool.api.wire.images import echo
from staged_pool.client import contents
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, ScoreRequest, TextInput, Video
from staged_pool.runtime.video_frames import join_frames, split_frames
from staged_pool.stages.errors import InvalidInput, UrlNotAllowed
from tests.support.cards import EMBEDDER

DATA = b"\0\0\0\x18ftypisom\0\0 not quite a video"
BASE64 = base64.b64encode(DATA).decode()
DATA_URL = f"data:video/mp4;base64,{BASE64}"
URL = "https://videos.example/cat.mp4"
FIRST, SECOND = b"\xff\xd8\xff first", b"\xff\xd8\xff second"
FRAMES = f"data:video/jpeg;base64,{base64.b64encode(FIRST).decode()},{base64.b64encode(SECOND).decode()}"


def read(reader: Read, fields: dict[str, Any]) -> Any:
    return Exchange(reader, json.dumps(fields).encode(), EMBEDDER, "r").decode()


def inputs(reader: Read = openai.read_embeddings, **fields: Any) -> tuple[object, ...]:
    request = read(reader, fields)
    assert isinstance(request, EmbedRequest)
    return request.inputs


def content(**part: Any) -> tuple[object, ...]:
    [found] = inputs(messages=[{"role": "user", "content": [part]}])
    assert isinstance(found, TextInput)
    assert isinstance(found.source, Chat)
    given = found.source.messages[0]["content"]
    assert isinstance(given, tuple)
    return given


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "video_url", "video_url": {"url": DATA_URL}}, DATA),
        ({"type": "video_url", "video_url": URL}, URL),
        ({"type": "video", "video": BASE64}, DATA),
        ({"type": "video", "video": "file:///videos/cat.mp4"}, "file:///videos/cat.mp4"),
        ({"type": "video_url", "video_url": {"url": FRAMES}}, join_frames([FIRST, SECOND])),
        ({"type": "video", "video": [base64.b64encode(each).decode() for each in (FIRST, SECOND)]},
         join_frames([FIRST, SECOND])),
    ],
)  # fmt: skip
def test_a_part_of_a_message_is_a_video(part: dict[str, Any], source: bytes | str) -> None:
    assert content(**part, uuid="mine") == (Video(source, key="mine"),)


@pytest.mark.parametrize(
    ("part", "where", "words"),
    [
        ({"type": "video_url"}, "video_url", "this field is required"),
        ({"type": "video_url", "video_url": [DATA_URL]}, "video_url", "expected a text"),
        ({"type": "video", "video": 5}, "video", "expected a text or a list of frames"),
        ({"type": "video", "video": []}, "video", "expected 1 to 100000 frames"),
        ({"type": "video", "video": [URL]}, "video[0]", "frames are not fetched"),
        ({"type": "video_url", "video_url": "data:video/mp4;base64,"}, "video_url", "the video is empty"),
        ({"type": "video_url", "video_url": "data:video/mp4;base64,?"}, "video_url", "as in data:video/mp4;base64"),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64,AAAA,,"}, "video_url", "commas between them"),
        ({"type": "video_url", "video_url": "ftp://a/b.mp4"}, "video_url", "expected a URL"),
        ({"type": "video_url", "video_url": URL, "uuid": 3}, "uuid", "expected a text"),
    ],
)
def test_a_wrong_part_is_named(part: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        content(**part)
    assert words in str(caught.value)
    assert f"messages[0].content[0].{where}" in str(caught.value)


def test_videos_stand_where_images_do() -> None:
    part = {"type": "video_url", "video_url": {"url": DATA_URL}}
    video = Video(DATA)
    assert inputs(input=[{"video": BASE64}, {"image": BASE64}, "a text"])[:2] == (video, Image(DATA))
    assert inputs(input={"video": URL}) == (Video(URL),)
    assert inputs(pooling.read_pooling, input=[{"video": URL}]) == (Video(URL),)
    segments = [{"type": "video_url", "video_url": URL}, {"type": "video_base64", "video_base64": DATA_URL}]
    [chat] = inputs(voyage.read_multimodal, inputs=[{"content": segments}])
    assert isinstance(chat, TextInput)
    assert isinstance(chat.source, Chat)
    assert chat.source.images == (Video(URL), video)
    found = read(score.read_score, {"queries": "a cat", "documents": [part, {"video": URL}, {"content": [part]}]})
    assert isinstance(found, ScoreRequest)
    assert found.documents == (video, Video(URL), video)
    [both] = inputs(input=[{"video": BASE64, "image": BASE64}])
    assert isinstance(both, TextInput)
    assert both.source == Chat(({"role": "user", "content": (Image(DATA), video)},))
    with pytest.raises(UrlNotAllowed):
        inputs(input=[{"video": "ftp://a/b.mp4"}])


def test_options_of_videos_are_those_of_both_fields() -> None:
    fields: dict[str, Any] = {
        "mm_processor_kwargs": {"max_pixels": 1000, "fps": 3},
        "media_io_kwargs": {"video": {"fps": 1, "max_duration": 60}, "image": {"rgba_background_color": [0, 0, 0]}},
    }
    found = inputs(input=[{"video": BASE64}, {"image": BASE64}], **fields)
    assert [each.options for each in found if isinstance(each, Image)] == [
        {"max_pixels": 1000, "fps": 1, "max_duration": 60},
        {"max_pixels": 1000, "fps": 3, "rgba_background_color": [0, 0, 0]},
    ]


def test_options_of_one_kind_of_media_may_be_nested() -> None:
    def options(processor: dict[str, Any], reading: dict[str, Any] | None = None) -> list[object]:
        fields: dict[str, Any] = {"mm_processor_kwargs": processor, "media_io_kwargs": reading or {}}
        found = inputs(input=[{"image": BASE64}, {"video": BASE64}], **fields)
        return [each.options for each in found if isinstance(each, Image)]

    nested: dict[str, Any] = {"images_kwargs": {"max_pixels": 9}, "videos_kwargs": {"fps": 3}}
    assert options(nested) == [{"max_pixels": 9}, {"fps": 3}]
    assert options({**nested, "do_resize": False}) == [
        {"do_resize": False, "max_pixels": 9},
        {"do_resize": False, "fps": 3},
    ]
    assert options(nested, {"video": {"fps": 1}})[1] == {"fps": 1}
    assert options({"videos_kwargs": None, "images_kwargs": {}, "text_kwargs": None}) == [{}, {}]
    # vLLM chooses frames while it reads a video, and the processor then takes all of them
    assert options({"do_sample_frames": False}, {"video": {"num_frames": 8}})[1] == {"num_frames": 8}
    assert options({"do_sample_frames": False})[1] == {"do_sample_frames": False}
    for processor, reading, said in (
        ({"images_kwargs": [1]}, None, "mm_processor_kwargs.images_kwargs: expected an object"),
        (
            {"max_pixels": 8, "images_kwargs": {"max_pixels": 9}},
            None,
            "mm_processor_kwargs.images_kwargs.max_pixels: give it once; it is in `mm_processor_kwargs`, too",
        ),
        (
            {"text_kwargs": {"padding": True}},
            None,
            "mm_processor_kwargs.text_kwargs: not supported; expected settings of images and videos, "
            "`images_kwargs` or `videos_kwargs`",
        ),
        ({}, {"videos": {"fps": 1}}, "media_io_kwargs.videos: not supported; expected `image` or `video`"),
        (
            {},
            {"image": {"mode": "L"}},
            "media_io_kwargs.image.mode: not supported; expected `rgba_background_color`",
        ),
        (
            {},
            {"image": {"image_mode": "L"}},
            "media_io_kwargs.image.image_mode: expected `RGB`, the colours that all models read",
        ),
    ):
        with pytest.raises(InvalidInput) as caught:
            options(processor, reading)
        assert str(caught.value) == said
    assert options({}, {"image": {"image_mode": "RGB"}, "audio": {"sampling_rate": 16000}}) == [{}, {}]


def test_a_long_video_is_cut_out_of_the_json() -> None:
    long = bytes(range(256)) * 200
    sent = base64.b64encode(long).decode()
    assert inputs(input=[{"video": f"data:video/mp4;base64,{sent}"}]) == (Video(long),)
    assert inputs(input=[{"video": f"data:video/jpeg;base64,{sent},{sent}"}]) == (Video(join_frames([long, long])),)
    for both in ({"text": "a", "video": sent}, {"content": [{"video": sent}, {"text": "a"}]}):
        [given] = inputs(input=["b", both])[1:]
        assert isinstance(given, TextInput)
        assert given.source == Chat(({"role": "user", "content": (Video(long), "a")},))


def test_files_of_forms_are_videos_by_field_or_type() -> None:
    def part(name: str, kind: str) -> str:
        return (
            f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\nContent-Type: {kind}\r\n\r\n1\r\n'
        )

    kinds = [
        ("video", "application/octet-stream"),
        ("file", "video/mp4"),
        ("file", "image/png"),
        ("image", "video/mp4"),
    ]
    body = "".join(part(*each) for each in kinds) + "--b--\r\n"
    found = json.loads(read_form(body.encode(), b"b").json)["input"]
    assert [list(each) for each in found] == [["video"], ["video"], ["image"], ["image"]]
    assert count_images(body.encode(), b"multipart/form-data; boundary=b") == 4
    text = '--b\r\nContent-Disposition: form-data; name="videos"\r\n\r\nhttps://a/b.mp4\r\n--b--\r\n'
    assert json.loads(read_form(text.encode(), b"b").json)["input"] == [{"video": "https://a/b.mp4"}]


def test_videos_are_counted_for_admission() -> None:
    part = {"type": "video_url", "video_url": {"url": DATA_URL}}
    assert count_images(json.dumps({"messages": [{"role": "user", "content": [part, part]}]}).encode()) == 2
    assert count_images(json.dumps({"input": [{"video": BASE64}]}).encode()) == 1
    assert count_images(json.dumps({"input": "a video"}).encode()) == 0


def test_an_echo_names_the_urls_of_videos() -> None:
    assert echo(Video(URL, key="mine")) == {
        "text": None,
        "multi_modal": [{"type": "video_url", "video_url": {"url": URL}, "uuid": "mine"}],
    }
    assert echo(Video(DATA))["multi_modal"] == [{"type": "video_url", "video_url": {"url": "data:,"}}]


def test_the_client_sends_what_the_server_reads() -> None:
    given: list[Video] = [
        Video(DATA, {"fps": 1}),
        Video(URL, {"fps": 1}),
        Video(join_frames([FIRST, SECOND]), {"fps": 1}),
    ]
    form = contents.form(given[0])
    assert form.fields == {"media_io_kwargs": {"video": {"fps": 1}}}
    body: dict[str, Any] = {"input": [contents.encoded(each) for each in given], **form.fields}
    assert inputs(**body) == tuple(given)
    chat = Chat(({"role": "user", "content": ("a", given[0])},))
    [found] = inputs(messages=contents.encoded(chat), media_io_kwargs=form.fields["media_io_kwargs"])
    assert isinstance(found, TextInput)
    assert found.source == chat
    mixed = [Image(DATA, {"max_pixels": 9}), given[0]]
    sent: dict[str, Any] = {"input": [contents.encoded(each) for each in mixed], **contents.options(mixed)}
    assert inputs(**sent) == tuple(mixed)
    with pytest.raises(InvalidInput, match="The videos of one request must have the same options"):
        contents.options([Video(DATA), given[0]])
    with pytest.raises(InvalidInput, match="The source of a Video must be"):
        contents.encoded(Video("cat.mp4"))


def test_ready_frames_are_joined_and_split() -> None:
    for frames in ([b"a"], [b"", b"abc"], [bytes(1000)] * 5):
        joined = join_frames(frames)
        assert split_frames(joined) == frames
        assert split_frames(joined[:-1]) is None or not frames[-1]
        assert split_frames(joined + b"x") is None
    assert split_frames(DATA) is None
    for wrong, kind in (([Image(FIRST)], "Image"), ([FIRST, bytearray(SECOND)], "bytearray"), ("abc", "str")):
        with pytest.raises(InvalidInput, match=f"must be the bytes of an encoded image, .*, not of type {kind}"):
            Video.of_frames(wrong)  # type: ignore[arg-type]
    assert split_frames(join_frames([b"a"])[:26]) is None
