"""Requests: one frozen value for each task, and their inputs."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from staged_pool.runtime.video_frames import join_frames
from staged_pool.stages.work import Request

MODEL_MAX: Final = -1
"""Value of `max_tokens`: cut inputs to the model's limit."""

MAX_SALT_CHARACTERS: Final = 1024
"""Most characters of a `Request.cache_salt`."""

HYPOTHESIS: Final = "This example is {}."
"""Usual `ClassifyRequest.hypothesis_template`, as in the zero-shot classification pipeline of transformers."""

MAX_LABEL_CHARACTERS: Final = 1024
"""Most characters of one of `ClassifyRequest.candidate_labels`, and of the template around it.

Each pair has a copy of both, and each text of an answer has a copy of a label.
"""

Side: TypeAlias = Literal["left", "right"]
Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]


class Output(enum.StrEnum):
    """A kind of output of a forward. A model has one or several, all from the same token vectors."""

    DENSE = "dense"
    """One vector."""
    SPARSE = "sparse"
    """Weights of a few entries of the vocabulary."""
    MULTI_VECTOR = "multi_vector"
    """One vector for each token."""
    LABELS = "labels"
    """One logit for each label."""
    TOKEN_LABELS = "token_labels"
    """One logit for each label and token."""
    TOKEN_WEIGHTS = "token_weights"
    """One weight for each token. `sparse` has the largest weight for each vocabulary entry."""


Outputs: TypeAlias = frozenset[Output]

DENSE_ONLY: Final[Outputs] = frozenset({Output.DENSE})


@dataclass(frozen=True, slots=True)
class Image:
    """An image as sent by the caller."""

    source: bytes | str
    """The encoded file, such as a JPEG, or its URL (http, https or file).

    A URL is fetched before preprocess, if the settings of the engine allow it.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    """Settings of the model's image processor for this image, instead of those in the folder."""

    key: str | None = None
    """Name of the image by its caller. The model does not read it."""


@dataclass(frozen=True, slots=True)
class Video(Image):
    """A video as sent by the caller. It goes wherever an image does; a model that reads no videos rejects it.

    `source` is the encoded file, such as an MP4, or its URL, or the result of `join_frames`. `options` are the choice
    of frames and the limits of their size, such as `num_frames`, `fps` and `max_pixels`.
    """

    @staticmethod
    def of_frames(frames: Sequence[bytes], *, fps: float | None = None) -> Video:
        """Return the video of frames that are chosen already.

        Args:
            frames: Encoded images, such as JPEGs, in the order of time: 1 to 100,000.
            fps: Frames a second. None: the usual rate of the model.
        """
        return Video(join_frames(frames), {} if fps is None else {"fps": fps})


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the chat template of the model's tokenizer turns into one text.

    The content of a message is a text or, for vision models, a tuple of texts (`str`), images (`Image`) and videos
    (`Video`) in reading order.
    """

    messages: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool = False
    """End with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, as if its author went on."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the template, beside the messages."""

    @property
    def characters(self) -> int:
        """Characters of all texts: close to the size after the template, for limits on bytes."""
        return sum(map(len, self.texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts, in reading order."""
        return tuple(part for part in self._parts() if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """All images and videos, in reading order."""
        return tuple(part for part in self._parts() if isinstance(part, Image))

    def with_images(self, images: Sequence[Image]) -> Chat:
        """Return the same conversation with other images, one for each of its own."""
        left = iter(images)
        return replace(self, messages=tuple(_with_images(message, left) for message in self.messages))

    def _parts(self) -> Iterator[object]:
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, tuple):
                yield from content
            else:
                yield content


def _with_images(message: Mapping[str, object], images: Iterator[Image]) -> Mapping[str, object]:
    content = message.get("content")
    if not isinstance(content, tuple):
        return message
    return {**message, "content": tuple(next(images) if isinstance(part, Image) else part for part in content)}


Content: TypeAlias = str | Image | Chat
"""A query or a document: a text, an image, or both of them as the one message of a conversation."""


class PluginSource:
    """Base of inputs that only their plugin can read; see `runtime/plugins/`."""

    __slots__ = ()


def content_bytes(content: Content) -> int:
    """Return the approximate bytes of a query or a document in memory."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Image):
        return len(content.source)
    return content.characters + sum(len(image.source) for image in content.images)


@dataclass(frozen=True, slots=True)
class TextInput:
    """A text, the token ids of a text, or a conversation."""

    source: str | tuple[int, ...] | Chat
    """The input. Token ids are used as they are: no prompt and no special tokens are added."""

    max_tokens: int | None = None
    """Maximum tokens of the input, special tokens included; a longer one is cut. `MODEL_MAX`: the model's limit.

    None: never cut; an input above the model's limit is rejected.
    """

    truncate_side: Side | None = None
    """Side that `max_tokens` cuts off. None: as in the model's folder, mostly the right."""

    add_special_tokens: bool = True
    """Add the special tokens of the tokenizer, such as [CLS] and [SEP]."""

    max_own_tokens: int | None = None
    """Maximum tokens of the text itself, without prompt and special tokens. It is cut first."""

    must_fit: bool = False
    """Reject an input that `max_tokens` would cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInput:
    """Two texts that the model reads together."""

    first: str
    second: str
    max_tokens: int | None = None
    """Limit for both texts together: the longer one is cut first. See `TextInput.max_tokens`."""
    max_first_tokens: int | None = None
    """Maximum tokens of the first text, which is cut before the pair."""
    max_second_tokens: int | None = None
    """Maximum tokens of the second text, which is cut before the pair."""
    truncate_side: Side | None = None
    """Side of each text that is cut off. See `TextInput.truncate_side`."""
    instruction: str | None = None
    """Description of a good match, for models whose template has a place for it."""
    cuts_first_only: bool = False
    """Let `max_tokens` cut the first text alone. A second text that leaves no room for it is an error."""


Parts: TypeAlias = tuple[str | Image, ...]
"""Texts and images of one content, in reading order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePair:
    """A query and a document that are read together, with images in at least one."""

    first: Parts
    second: Parts
    max_tokens: int | None = None
    """See `PairInput.max_tokens`."""
    max_first_tokens: int | None = None
    """See `PairInput.max_first_tokens`: for texts only."""
    max_second_tokens: int | None = None
    """See `PairInput.max_second_tokens`: for texts only."""
    truncate_side: Side | None = None
    """Side of the document that is cut off."""
    instruction: str | None = None
    """Description of a good match, for models whose template has a place for it."""

    @property
    def images(self) -> tuple[Image, ...]:
        """All images, in reading order."""
        return tuple(part for part in (*self.first, *self.second) if isinstance(part, Image))

    def with_images(self, images: Sequence[Image]) -> ImagePair:
        """Return the same pair with other images, one for each of its own."""
        left = iter(images)
        first, second = (
            tuple(next(left) if isinstance(part, Image) else part for part in parts)
            for parts in (self.first, self.second)
        )
        return replace(self, first=first, second=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(Request):
    """A request for vectors of each input, of one or several kinds from one forward."""

    inputs: tuple[TextInput | Image, ...]

    name: str | None = field(default=None, compare=False)
    """The caller's name for the inputs, for errors. None: the usual name."""

    outputs: Outputs = DENSE_ONLY
    """Any of dense, sparse, multi_vector and token_weights that the model has."""

    dimensions: int | None = None
    """Number of leading values to keep of each dense vector, which is normalised again. None: all."""

    normalize: bool = True
    """False returns vectors as pooled, and token weights before their activation."""

    prompt_name: str | None = None
    """Name of the model's prompt to put before each text. None: the default prompt, if there is one."""

    prompt: str | None = None
    """Text to put before each text instead of a prompt of the model."""

    late_chunking: bool = False
    """Read the texts, joined as they are, as the chunks of one document: each still gets a dense vector of its own."""

    chunk_tokens: int | None = None
    """Tokens of each chunk, special ones included, that has a vector in multi_vector. None: each token has one."""

    offsets: bool = False
    """Return the characters of each token that has a vector in multi_vector."""

    max_active_dims: int | None = None
    """Number of the largest weights to keep of each sparse vector. None: all that the model's folder keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(Request):
    """A request for a score of each label for each input."""

    inputs: tuple[TextInput | PairInput | Image, ...]

    activate: bool = True
    """False returns logits, without the model's activation."""

    candidate_labels: tuple[str, ...] | None = None
    """Labels of the caller. None: the labels of the model.

    A model of natural language inference reads each text with each of them (zero-shot classification). So a request has
    an item for each of these pairs.
    """

    hypothesis_template: str = HYPOTHESIS
    """Statement about a text that each label completes: `{}` stands for the label. Only with `candidate_labels`."""

    multi_label: bool = False
    """Score each of `candidate_labels` by itself. False: the scores of a text add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassifyRequest(Request):
    """A request for the label of each token, and for entities."""

    inputs: tuple[TextInput, ...]

    aggregation: Aggregation = "simple"
    """Rule that makes entities from tokens, as in the token classification pipeline of transformers.

    - `none`: Each token with a label is an entity.
    - `simple`: Adjacent tokens of one entity are joined.
    - `first`, `average` and `max`: Before that, all tokens of a word get one label: that of the first token, of the
      average, or of the token with the highest score.
    """

    activate: bool = True
    """False returns logits for each token, not probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(Request):
    """A request for a score of each document for its query."""

    queries: tuple[Content, ...]
    """One for all documents, or one for each."""

    documents: tuple[Content, ...]

    names: tuple[str, str] = field(default=("queries", "documents"), compare=False)
    """The caller's names for queries and documents, for errors."""

    activate: bool = True
    """False returns the logits of a cross-encoder, without its activation."""

    max_tokens: int | None = None
    """Limit for a pair if the model reads pairs, else for each text. See `TextInput.max_tokens`."""

    max_query_tokens: int | None = None
    """Maximum tokens of a query, which is cut before the pair."""

    max_document_tokens: int | None = None
    """Maximum tokens of a document, which is cut before the pair."""

    truncate_side: Side | None = None
    """Side of a text that is cut off. See `TextInput.truncate_side`."""

    instruction: str | None = None
    """Description of a good match, for models whose template has a place for it."""
