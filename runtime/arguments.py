"""Arguments of the Python API, checked and converted to request values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TypeAlias, TypeGuard

from staged_pool.runtime.argument_types import of_type, several
from staged_pool.runtime.requests import (
    DENSE_ONLY,
    MAX_SALT_CHARACTERS,
    Chat,
    Content,
    Image,
    Output,
    Outputs,
    PairInput,
    TextInput,
    content_bytes,
)
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.scheduling.entries import Priority

Texts: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
"""A text, several texts, or the token ids of several texts."""

Inputs: TypeAlias = Texts | Content | Sequence[Content | Sequence[int]]
"""Texts, images and conversations, one or several."""

_TEXT_OR_IDS = "a text, a list of token ids or a Chat"
_ANY = "a text, a list of token ids, an Image or a Chat"


def priority(given: object) -> Priority:
    """Convert a priority, or its name.

    Raises:
        InvalidInput: It is no priority.
    """
    if isinstance(given, Priority):
        return given
    for known in Priority:
        if given == known:
            return known
    raise InvalidInput(f"priority: expected {' or '.join(Priority)}", param="priority")


def cache_salt(given: object) -> str | None:
    """Check the salt of a request.

    Raises:
        InvalidInput: It is neither None nor a text of 1 to `MAX_SALT_CHARACTERS` characters.
    """
    if given is None or (isinstance(given, str) and 1 <= len(given) <= MAX_SALT_CHARACTERS):
        return given
    raise InvalidInput(f"cache_salt must be a text of 1 to {MAX_SALT_CHARACTERS} characters.", param="cache_salt")


def text_inputs(inputs: object, max_tokens: int | None) -> tuple[TextInput, ...]:
    """Convert `Texts` and conversations.

    Raises:
        InvalidInput: An input is something else; the error has its index.
    """
    whole_number("max_tokens", max_tokens)
    return tuple(
        _chat_input(index, source, max_tokens)
        if isinstance(source, Chat)
        else _text_input(index, source, max_tokens, _TEXT_OR_IDS)
        for index, source in enumerate(each(inputs))
    )


def inputs(given: object, max_tokens: int | None) -> tuple[TextInput | Image, ...]:
    """Convert `Inputs`.

    Raises:
        InvalidInput: An input is something else; the error has its index.
    """
    whole_number("max_tokens", max_tokens)
    if isinstance(given, str):
        return (TextInput(given, max_tokens),)
    return tuple([_input(index, source, max_tokens, _ANY) for index, source in enumerate(each(given))])


def inputs_or_pairs(given: object, max_tokens: int | None) -> tuple[TextInput | PairInput | Image, ...]:
    """Convert `Inputs`, in which a tuple of two texts is a pair.

    Raises:
        InvalidInput: An input is something else; the error has its index.
    """
    whole_number("max_tokens", max_tokens)
    return tuple(
        PairInput(first=source[0], second=source[1], max_tokens=max_tokens)
        if _is_pair(source)
        else _input(index, source, max_tokens, f"{_ANY}, or a pair, which is a tuple of two texts")
        for index, source in enumerate(each(given))
    )


def contents(name: str, given: object) -> tuple[Content, ...]:
    """Convert one or several queries or documents: texts, images or conversations.

    Raises:
        InvalidInput: One of them is something else; the error has its index.
    """
    found: list[Content] = []
    for index, one in enumerate(each(given, name)):
        if not isinstance(one, str | Image | Chat):
            message = f"{name}[{index}] must be a text, an Image or a Chat, not {of_type(one)}"
            raise InvalidInput(message, param=name, index=index)
        _check_images(one, name, index)
        found.append(one)
    return tuple(found)


def pairs(given: Iterable[object]) -> tuple[tuple[object, object], ...]:
    """Check pairs of a query and a document, whose contents are not checked.

    Raises:
        InvalidInput: One of them is no tuple or list of two; the error has its index.
    """
    found: list[tuple[object, object]] = []
    for index, pair in enumerate(given):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            message = f"Input {index} must be a pair, such as (query, document), not {of_type(pair)}"
            raise InvalidInput(message, param="input", index=index)
        found.append((pair[0], pair[1]))
    return tuple(found)


def outputs(names: Output | str | Iterable[Output | str]) -> Outputs:
    """Convert one or several names of outputs.

    Raises:
        InvalidInput: There is no output of a name.
    """
    if names is DENSE_ONLY:  # the usual case
        return DENSE_ONLY
    try:
        return frozenset(map(Output, (names,) if isinstance(names, str) else names))
    except (ValueError, TypeError):
        known = ", ".join(sorted((Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKEN_WEIGHTS)))
        raise InvalidInput(f"outputs must be one or several of {known}.", param="outputs") from None


def candidate_labels(given: object) -> tuple[str, ...] | None:
    """Convert labels, given as several texts or as one with commas between them.

    Raises:
        InvalidInput: They are something else.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return tuple(label.strip() for label in given.split(",") if label.strip())
    wanted = "texts, or one text with commas between the labels"
    labels: list[str] = []
    for label in several("candidate_labels", given, wanted):
        if not isinstance(label, str):
            raise InvalidInput(f"candidate_labels must be {wanted}, not {of_type(label)}", param="candidate_labels")
        labels.append(label)
    return tuple(labels)


def whole_number(name: str, value: object) -> None:
    """Check that a value is None or an int, else raise `InvalidInput`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidInput(f"{name} must be an int, not of type {type(value).__name__}.", param=name)


def time_limit(value: object) -> None:
    """Check that a value is a number above 0, or infinity, else raise `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise InvalidInput(f"timeout_s={value!r}: must be a number of seconds above 0.", param="timeout_s")


def text(name: str, value: object) -> None:
    """Check that a value is None or a text, else raise `InvalidInput`."""
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{name} must be a text, not of type {type(value).__name__}.", param=name)


def size(inputs: Iterable[TextInput | PairInput | Image]) -> int:
    """Return the approximate bytes of inputs: characters, token ids, or bytes of images."""
    return sum([_length(given) for given in inputs])


def each(given: object, name: str = "input") -> Iterable[object]:
    """Return the inputs, queries or documents of a call, given as one or several.

    Raises:
        InvalidInput: They are neither.
    """
    if isinstance(given, str | Image | Chat):
        return (given,)
    return several(name, given, "a text, an Image, a Chat, or a list of these")


def token_ids(name: str, given: object) -> Sequence[int]:
    """Check the token ids of one text.

    Raises:
        InvalidInput: They are no list of ints.
    """
    if not _are_token_ids(given):
        raise InvalidInput(f"{name} must be a list of token ids, not {of_type(given)}", param=name)
    return given


def source(name: str, given: object) -> str | Chat:
    """Check a text or a conversation, for its tokens.

    Raises:
        InvalidInput: It is something else.
    """
    if not isinstance(given, str | Chat):
        raise InvalidInput(f"{name} must be a text or a Chat, not {of_type(given)}", param=name)
    return given


def _text_input(index: int, source: object, max_tokens: int | None, wanted: str) -> TextInput:
    if isinstance(source, str):
        return TextInput(source, max_tokens)
    if _are_token_ids(source):
        return TextInput(tuple(source), max_tokens)
    raise InvalidInput(f"Input {index} must be {wanted}, not {of_type(source)}", param="input", index=index)


def _are_token_ids(given: object) -> TypeGuard[Sequence[int]]:
    # Bytes are a sequence of ints, too, and never meant as token ids.
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes | bytearray | memoryview)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in given)
    )


def _input(index: int, source: object, max_tokens: int | None, wanted: str) -> TextInput | Image:
    if not isinstance(source, Image | Chat):
        return _text_input(index, source, max_tokens, wanted)
    if isinstance(source, Chat):
        return _chat_input(index, source, max_tokens)
    _check_images(source, "input", index)
    return source


def _chat_input(index: int, source: Chat, max_tokens: int | None) -> TextInput:
    _check_images(source, "input", index)
    return TextInput(source, max_tokens, add_special_tokens=False)  # the chat template writes the special tokens


def _check_images(content: Content, param: str, index: int) -> None:
    images = (content,) if isinstance(content, Image) else content.images if isinstance(content, Chat) else ()
    for image in images:
        source: object = image.source
        if not isinstance(source, bytes | str):
            message = f"{param}[{index}]: an Image is made of the bytes of a file, or of its URL as a text, not "
            raise InvalidInput(message + of_type(source), param=param, index=index)


def _is_pair(source: object) -> TypeGuard[tuple[str, str]]:
    return isinstance(source, tuple) and len(source) == 2 and all(isinstance(text, str) for text in source)


def _length(given: TextInput | PairInput | Image) -> int:
    match given:
        case TextInput(source):
            return len(source) if isinstance(source, tuple) else content_bytes(source)
        case PairInput():
            return len(given.first) + len(given.second)
        case Image():
            return content_bytes(given)
