"""Voyage's `/v1/multimodalembeddings`; `openai` and `score` read its other routes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, Literal

import msgspec

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump_around
from staged_pool.api.wire.encodings import EmbedDType, Encoding, check_bits
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Dimensions, RequestFields
from staged_pool.api.wire.images import read_image, read_video, with_options
from staged_pool.api.wire.input_types import prompt_for
from staged_pool.api.wire.parts import document
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import NoInputs, Words, shortened


class Segment(msgspec.Struct):
    """Text, image or video of one input, with the fields of all types."""

    type: str
    text: str | None = None
    image_url: str | None = None
    image_base64: str | None = None
    """A data URL."""
    video_url: str | None = None
    video_base64: str | None = None
    """A data URL."""

    def read(self, where: str, index: int) -> str | Image:
        """Return the text, the image or the video.

        Raises:
            InvalidInput: The type is unknown, or the field of the type is missing or wrong.
        """
        match self.type:
            case "text" | "image_url" | "image_base64" | "video_url" | "video_base64":
                given: object = getattr(self, self.type)
            case _:
                known = "`text`, `image_url`, `image_base64`, `video_url` and `video_base64` are"
                what = f"`{shortened(self.type)}` is not supported; {known}"
                raise field_error(f"{where}.type", what, index)
        if not isinstance(given, str):
            raise field_error(f"{where}.{self.type}", "this field is required", index)
        if self.type == "text":
            return given
        read = read_video if self.type.startswith("video") else read_image
        return read(given, f"{where}.{self.type}", index, bare=False)


class MultimodalInput(msgspec.Struct):
    """Texts, images and videos that become one vector."""

    content: Annotated[list[Segment], msgspec.Meta(min_length=1)]


class MultimodalBody(RequestFields, kw_only=True):
    """Body of `/v1/multimodalembeddings`; fields that are not named here are ignored."""

    inputs: list[MultimodalInput]
    input_type: str | None = None
    """Use of the inputs, which selects a prompt; ignored by a model without prompts."""
    truncation: bool | None = None
    """False rejects an input that is too long; otherwise it is truncated."""
    output_dimension: Dimensions | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    encoding_format: Literal["base64"] | None = None
    output_encoding: Literal["base64"] | None = None
    """Another name of `encoding_format`."""


_BODY: Final = msgspec.json.Decoder(MultimodalBody)


def read_multimodal(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    fields = read_body(_BODY, body)
    if not fields.inputs:
        raise NoInputs("`inputs` is empty; give at least one", param="inputs")
    dtype: EmbedDType = (
        "float32" if fields.output_dtype is None or fields.output_dtype == "float" else fields.output_dtype
    )
    check_bits(dtype, fields.output_dimension or card.width, "output_dtype")
    form: Final = "base64" if fields.encoding_format or fields.output_encoding else "float"
    request = EmbedRequest(
        inputs=tuple(_input(given, index, fields) for index, given in enumerate(fields.inputs)),
        name="inputs",
        words=Words(
            {"input": "inputs", "max_tokens": "truncation", "dimensions": "output_dimension"}, InputPaths("inputs")
        ),
        model=fields.model,
        cache_salt=fields.cache_salt,
        dimensions=fields.output_dimension,
        prompt_name=prompt_for(fields.input_type, card),
    )
    return request, partial(encode_multimodal, encoding=Encoding(form, dtype, "little"))


def _input(given: MultimodalInput, index: int, fields: MultimodalBody) -> TextInput | Image:
    where = f"inputs[{index}].content"
    parts = [segment.read(f"{where}[{place}]", index) for place, segment in enumerate(given.content)]
    content = with_options(document(parts), fields.media_options())
    if isinstance(content, Image):
        return content
    limit = None if fields.truncation is False else MODEL_MAX
    return TextInput(content, max_tokens=limit, add_special_tokens=isinstance(content, str))


def encode_multimodal(result: EmbedResult, /, encoding: Encoding, *, request_id: str, created: int) -> Pieces:
    """Write the vectors; see `Write`. All tokens are counted as `text_tokens`, and pixels as 0."""
    data = (
        {"object": "embedding", "embedding": encoding.value(row), "index": index, **encoding.scale(row)}
        for index, row in enumerate(result.embeddings)
    )
    tokens = result.usage.prompt_tokens
    usage = {"text_tokens": tokens, "image_pixels": 0, "video_pixels": 0, "total_tokens": tokens}
    before = {"object": "list", "model": result.model}
    return dump_around(before, "data", data, {"usage": usage}, item_values=result.embeddings.shape[1])
