"""What a caller can ask for: one frozen value a task, and the inputs that they hold."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from staged_pool.stages.work import Request

MODEL_MAX: Final = -1
"""For `max_tokens`: cut at the longest input that the model takes."""

MAX_SALT_CHARACTERS: Final = 1024
"""Characters of a `Request.cache_salt`."""

Side: TypeAlias = Literal["left", "right"]
Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]


class Output(enum.StrEnum):
    """What a forward can give for one input. A model has one or several of them, all from the same token vectors."""

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
    """One weight for each token, of which `sparse` has the largest of each entry of the vocabulary."""


Outputs: TypeAlias = frozenset[Output]

DENSE_ONLY: Final[Outputs] = frozenset({Output.DENSE})


@dataclass(frozen=True, slots=True)
class Image:
    """An image, as the caller sent it."""

    source: bytes | str
    """The encoded file, such as a JPEG; or the URL where it lies (http, https or file), from which it is fetched before
    preprocess, if the settings of the engine allow that."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Settings of the model's image processor that hold for this image instead of the folder's."""

    key: str | None = None
    """What the caller calls this image: of no meaning to the model."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the chat template of the model's tokenizer turns into one text.

    The content of a message is a text; or, for models that see, a tuple of its parts: texts (`str`) and images
    (`Image`), in the order in which the model is to read them.
    """

    messages: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool = False
    """End with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, as if its author went on."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """What the template is given beside the messages."""

    @property
    def characters(self) -> int:
        """Of all texts: near enough to what a template makes of them, for limits on bytes."""
        return sum(map(len, self.texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """What is said, in the order in which it is."""
        return tuple(part for part in self._parts() if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images in the order in which they are shown."""
        return tuple(part for part in self._parts() if isinstance(part, Image))

    def with_images(self, images: Sequence[Image]) -> Chat:
        """The same conversation about other images, as many as it has."""
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


def content_bytes(content: Content) -> int:
    """About what a query or a document takes in memory."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Image):
        return len(content.source)
    return content.characters + sum(len(image.source) for image in content.images)


@dataclass(frozen=True, slots=True)
class TextInput:
    """One text, the token ids of one text, or a conversation, as the caller sent it."""

    source: str | tuple[int, ...] | Chat
    """Token ids are taken as they are: no prompt and no special tokens are added."""

    max_tokens: int | None = None
    """Cut to this many tokens, special tokens included. `MODEL_MAX`: as many as the model takes.
    None: never cut; an input longer than the model takes is refused."""

    truncate_side: Side | None = None
    """Which end is cut off when `max_tokens` cuts. None: the one that the model's folder says, mostly the right."""

    add_special_tokens: bool = True
    """Whether the tokenizer adds the tokens that the model was trained with (such as [CLS] and [SEP])."""

    max_own_tokens: int | None = None
    """Cut the text to so many tokens of its own first, before a prompt and special tokens are added."""

    must_fit: bool = False
    """Refuse what `max_tokens` would cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInput:
    """Two texts that the model reads together."""

    first: str
    second: str
    max_tokens: int | None = None
    """As for `TextInput`, of both together: the longer one is cut first."""
    max_first_tokens: int | None = None
    """Cut the first text to so many tokens of its own before they are joined."""
    max_second_tokens: int | None = None
    truncate_side: Side | None = None
    """As for `TextInput`, of each text."""
    instruction: str | None = None
    """What the model is to look for; for models whose template has a place for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(Request):
    """Vectors of each input: of one kind, or of several from one forward."""

    inputs: tuple[TextInput | Image, ...]

    name: str | None = field(default=None, compare=False)
    """What the caller calls the inputs, for errors. None: as everybody does."""

    outputs: Outputs = DENSE_ONLY
    """Any of dense, sparse, multi_vector and token_weights that the model has."""

    dimensions: int | None = None
    """Keep the first so many values of each dense vector, and normalise it again. None: all of them."""

    normalize: bool = True
    """False returns vectors as pooled, also where the model normalises them; and weights before their activation."""

    prompt_name: str | None = None
    """Put this one of the model's prompts before each text. None: the model's default, if it has one."""

    prompt: str | None = None
    """Put this before each text instead of a prompt of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(Request):
    """How well each label fits each input."""

    inputs: tuple[TextInput | PairInput | Image, ...]

    activate: bool = True
    """False returns logits instead of what the model's activation makes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassifyRequest(Request):
    """The label of each token, or the entities that they spell."""

    inputs: tuple[TextInput, ...]

    aggregation: Aggregation = "simple"
    """How tokens become entities: `none` gives each token that has a label; `simple` joins neighbours of one entity;
    `first`, `average` and `max` also have all tokens of a word agree, on the label of the first, the average or the
    surest one. As in transformers' token classification pipeline."""

    activate: bool = True
    """False returns logits per token instead of probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(Request):
    """How well each document answers its query: a number for each pair."""

    queries: tuple[Content, ...]
    """One for all documents, or one for each."""

    documents: tuple[Content, ...]

    names: tuple[str, str] = field(default=("queries", "documents"), compare=False)
    """What the caller calls the two of them, for errors."""

    activate: bool = True
    """False returns a cross-encoder's logit instead of what its activation makes of it."""

    max_tokens: int | None = None
    """Of what the model reads at once: a pair, or one text. As for `TextInput`."""

    max_query_tokens: int | None = None
    """Cut queries to so many tokens of their own first."""

    max_document_tokens: int | None = None

    truncate_side: Side | None = None
    """As for `TextInput`."""

    instruction: str | None = None
    """What the model is to look for; for models whose template has a place for it."""
