"""Jina's fields of `/v1/embeddings`: object inputs, tasks and embedding types."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.encodings import EmbedDType, Encoding
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.parts import ContentPart, document, read_parts
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Content

EmbeddingType: TypeAlias = Literal[
    "float", "base64", "float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"
]

_ROLES: Final = {"query": "query", "passage": "document"}
TASKS: Final = (
    "retrieval.query", "retrieval.passage", "retrieval", "text-matching", "classification", "clustering", "separation",
    "code", "code.query", "code.passage", "nl2code.query", "nl2code.passage",
)  # fmt: skip
"""Values of Jina's `task`. If the model has no prompt for one, the text gets none."""


class ObjectInput(ContentPart):
    """Input object: a text, an image, a video, several of them as one input, or its parts in `content`."""

    content: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    role: Any = None
    """Set in a message of a conversation, which is not an input object."""

    @property
    def has_content(self) -> bool:
        return isinstance(self.content, msgspec.Raw) and not json_decode.is_null(self.content)


_OBJECT: Final = msgspec.json.Decoder(ObjectInput)
_OBJECTS: Final = msgspec.json.Decoder(list[str | ObjectInput])
_CONTENT: Final = msgspec.json.Decoder(str | list[ContentPart])


def object_inputs(raw: msgspec.Raw, root: str) -> tuple[list[Content], InputPaths] | None:
    """Read one input object, or a list of texts and objects.

    Returns:
        The inputs and their paths; None if the list holds messages.

    Raises:
        InvalidInput: An object has no text, no image and no video, or one of them is wrong.
    """
    depth, _ = json_decode.shape(raw)
    if depth == 0:
        alone = json_decode.decode(_OBJECT, raw, root=root)
        return [_source(alone, root, None)], InputPaths(root, several=False, endings=[_ending(alone)])
    given = json_decode.decode(_OBJECTS, raw, root=root)
    if isinstance(given[0], ObjectInput) and given[0].role is not None:
        return None
    sources = [_source(each, f"{root}[{index}]", index) for index, each in enumerate(given)]
    return sources, InputPaths(root, endings=[_ending(each) for each in given])


def _ending(given: str | ObjectInput) -> str:
    """Return the path from an input to its only field."""
    if isinstance(given, str):
        return ""
    names = ["content"] if given.has_content else given.given
    return f".{names[0]}" if len(names) == 1 else ""


def _source(given: str | ObjectInput, where: str, index: int | None) -> Content:
    if isinstance(given, str):
        return given
    if isinstance(given.content, msgspec.Raw) and given.has_content:
        parts = json_decode.decode(_CONTENT, given.content, root=f"{where}.content")
        if isinstance(parts, str):
            return parts
        if not parts:
            raise field_error(f"{where}.content", "at least one part is needed", index)
        return document(read_parts(parts, f"{where}.content", index))
    if not given.given and given.type is None:
        what = "expected an object with `text`, `image`, `video` or several of them, or a message with a `role`"
        raise field_error(where, what, index)
    return document(given.read(where, index))


def prompt_name(task: str | None, card: ModelCard) -> str | None:
    """Return the name of the model's prompt for a task; None: no prompt.

    Raises:
        InvalidInput: The task is unknown.
    """
    if task is None or task in card.prompts:
        return task
    if task not in TASKS:
        known = ", ".join(f"`{name}`" for name in dict.fromkeys((*card.prompts, *TASKS)))
        raise field_error("task", f"expected one of {known}")
    name = task.rpartition(".")[2]
    if name in card.prompts:
        return name
    # `query` and `passage` select the roles of the engine; a model without prompts has no roles.
    return _ROLES.get(name) if card.prompts else None


def encoding_of(embedding_type: EmbeddingType) -> Encoding:
    """Return the encoding of an embedding type: JSON numbers rounded to the type, or float32 in base64."""
    if embedding_type == "base64":
        return Encoding("base64", endianness="little")
    dtype: EmbedDType = "float32" if embedding_type == "float" else embedding_type
    return Encoding("float", dtype, rounded=True)
