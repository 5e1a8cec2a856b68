"""JSON schemas of bodies and answers: those of msgspec, completed by docstrings and untyped fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import msgspec.inspect

from staged_pool.api.openapi.notes import field_notes

Schema: TypeAlias = dict[str, Any]

REFERENCE: Final = "#/components/schemas/{name}"

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"anyOf": [_TEXT, {"type": "null"}]}
_TEXTS: Final[Schema] = {"type": "array", "items": _TEXT, "minItems": 1}
_ANY_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_IDS: Final[Schema] = {**_ANY_IDS, "minItems": 1}
_URL: Final[Schema] = {
    "anyOf": [_TEXT, {"type": "object", "properties": {"url": _TEXT}, "required": ["url"]}],
}
_FRAMES: Final[Schema] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
"""A video, or its frames."""
_PART: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": names}, field: schema},
            "required": [field],
        }
        for names, field, schema in (
            (["text", "input_text"], "text", _TEXT),
            (["image_url", "input_image"], "image_url", _URL),
            (["image"], "image", _TEXT),
            (["video_url"], "video_url", _URL),
            (["video"], "video", _FRAMES),
        )
    ]
}
_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}},
    "required": ["role", "content"],
}
_CHAT: Final[Schema] = {"type": "array", "items": _MESSAGE, "minItems": 1}
_CHATS: Final[Schema] = {"anyOf": [_CHAT, {"type": "array", "items": _CHAT, "minItems": 1}]}

_LISTS_OF_IDS: Final[Schema] = {"type": "array", "items": _IDS, "minItems": 1}
_OBJECT: Final[Schema] = {
    "anyOf": [
        *_PART["anyOf"],
        {
            "type": "object",
            "properties": {"content": {"type": "array", "items": _PART, "minItems": 1}},
            "required": ["content"],
        },
    ]
}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"anyOf": [_TEXT, *_OBJECT["anyOf"]]}, "minItems": 1}

UNTYPED: Final[Mapping[str, Schema]] = {
    "input": {"anyOf": [_TEXT, _TEXTS, _IDS, _LISTS_OF_IDS, *_CHATS["anyOf"], *_OBJECT["anyOf"], _OBJECTS]},
    "inputs": {"anyOf": [_TEXT, _TEXTS, _IDS, _LISTS_OF_IDS]},
    "ids": {"anyOf": [_ANY_IDS, {"type": "array", "items": _ANY_IDS}]},
    "text": _TEXT_OR_NULL,
    "image": _TEXT_OR_NULL,
    "image_url": {"anyOf": [*_URL["anyOf"], {"type": "null"}]},
    "video": {"anyOf": [*_FRAMES["anyOf"], {"type": "null"}]},
    "video_url": {"anyOf": [*_URL["anyOf"], {"type": "null"}]},
    "uuid": _TEXT_OR_NULL,
    "source": {"type": "null"},
    "file_id": {"type": "null"},
    "messages": {"anyOf": [*_CHATS["anyOf"], {"type": "null"}]},
    "normalize": {"not": {}},
    "chat_template": {"type": "null"},
}
"""Schemas of fields that are decoded in a second step, by name; `not: {}` is a field that is rejected."""


def components(types: Sequence[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schemas of types, and of all types that they refer to.

    It reads source files, so do not call it on the event loop.

    Returns:
        A schema for each type; and the schemas that `REFERENCE` refers to, by name.
    """
    classes = list(dict.fromkeys(cls for kind in msgspec.inspect.multi_type_info(types) for cls in _classes(kind)))
    schemas, named = msgspec.json.schema_components([*types, *classes], ref_template=REFERENCE)
    for cls, reference in zip(classes, list(schemas)[len(types) :], strict=True):
        _complete(named[reference["$ref"].rpartition("/")[2]], cls)
    words = {name: schema["enum"] for name, schema in named.items() if "enum" in schema}
    inline = {REFERENCE.format(name=name): {"enum": values} for name, values in words.items()}
    written = {name: _inlined(schema, inline) for name, schema in named.items() if name not in words}
    return list(schemas)[: len(types)], written


def _inlined(schema: Any, inline: Mapping[str, Schema]) -> Any:
    """Replace references to enumerations by their values, as for `Literal` types."""
    if isinstance(schema, list):
        return [_inlined(part, inline) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if (words := inline.get(schema.get("$ref", ""))) is not None:
        return words
    return {name: _inlined(part, inline) for name, part in schema.items()}


def _complete(schema: Schema, cls: type) -> None:
    """Add the docstrings of fields, and the schemas of untyped fields."""
    notes = field_notes(cls)
    properties: dict[str, Schema] = schema.get("properties", {})
    for name, field in properties.items():
        if not set(field) - {"default"}:
            field.update(UNTYPED.get(name, {}))
        if name in notes:
            field.setdefault("description", notes[name])


def _classes(kind: object) -> Iterator[type]:
    """Yield every class with fields in a type."""
    if isinstance(kind, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
        yield kind.cls
    if isinstance(kind, msgspec.Struct):
        for name in kind.__struct_fields__:
            yield from _classes(getattr(kind, name))
    elif isinstance(kind, tuple):
        for part in kind:
            yield from _classes(part)
