"""Inputs of `encode` and `predict`: one or a list, as sentence-transformers tells them apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from staged_pool.runtime.argument_types import of_type, several
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Chat, Content, Image
from staged_pool.stages.errors import InvalidArgument, InvalidInput

Pairs: TypeAlias = Sequence[str] | Sequence[Sequence[str]]
"""A pair of a query and a document, or a list of pairs."""

_PARAMS: Final = {"inputs": "input", "documents": "documents"}
_IMAGES: Final = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tiff", ".webp")
_VIDEOS: Final = (".mp4", ".avi", ".mov", ".wmv", ".flv", ".mkv")


def listed(inputs: object, card: ModelCard) -> tuple[list[Content], bool]:
    """Return the inputs of `encode`, and True if one was given without a list.

    Raises:
        InvalidArgument: They are neither an input nor a list of inputs, or a text that sentence-transformers would
            open as an image or a video.
    """
    is_single = isinstance(inputs, str | Image | Chat)
    each = [inputs] if is_single else _items(inputs, "a text, an Image or a Chat, or a list of these")
    found: list[Content] = []
    for index, given in enumerate(each):
        if not isinstance(given, str | Image | Chat):
            message = f"inputs[{index}] must be a text, an Image or a Chat, not {of_type(given)}"
            raise InvalidArgument(message, param="input", index=index)
        if isinstance(given, str):
            _check_text(given, card, index)
        found.append(given)
    return found, is_single


def listed_pairs(inputs: object) -> tuple[list[tuple[str, str]], bool]:
    """Return the pairs of `predict`, and True if one was given without a list.

    Raises:
        InvalidArgument: They are neither a pair of texts nor a list of pairs.
    """
    each = _items(inputs, "a pair of texts, or a list of pairs")
    is_single = bool(each) and isinstance(each[0], str)
    found: list[tuple[str, str]] = []
    for index, pair in enumerate([each] if is_single else each):
        wrong = pair
        match pair.tolist() if isinstance(pair, np.ndarray) else pair:
            case [str(query), str(document)]:
                found.append((query, document))
                continue
            case [query, document]:
                wrong = query if isinstance(document, str) else document
        message = f"inputs[{index}] must be a pair of two texts, such as (query, document), not {of_type(wrong)}"
        raise InvalidArgument(message, param="input", index=index)
    return found, is_single


def listed_documents(documents: object) -> list[str]:
    """Return the documents of `rank`.

    Raises:
        InvalidArgument: They are no list of texts.
    """
    found: list[str] = []
    for index, text in enumerate(_items(documents, "a list of texts", "documents")):
        if not isinstance(text, str):
            message = f"documents[{index}] must be a text, not {of_type(text)}"
            raise InvalidArgument(message, param="documents", index=index)
        found.append(text)
    return found


def _items(given: object, wanted: str, name: str = "inputs") -> list[object]:
    if isinstance(given, str):  # of which each letter would be one
        raise InvalidArgument(f"{name} must be {wanted}, not one text.", param=_PARAMS[name])
    try:
        found = several(name, given, wanted)
    except InvalidInput as error:
        raise InvalidArgument(str(error), param=_PARAMS[name]) from None
    if not isinstance(found, Sequence | np.ndarray):
        message = f"{name} must be {wanted}, not of type {type(given).__name__}. Pass a list, as in `list(given)`."
        raise InvalidArgument(message, param=_PARAMS[name])
    return list(found)


def _check_text(text: str, card: ModelCard, index: int) -> None:
    """Reject a text that sentence-transformers would open as an image or a video."""
    if "image" not in card.lanes:
        return
    is_image, is_video = text.startswith("data:image/") or _names_file(text, _IMAGES), _names_file(text, _VIDEOS)
    if is_image or (is_video and card.reads_videos):
        kind = "Image" if is_image else "Video"
        message = f"inputs[{index}] names a file, and here a text is only read: pass the file as {kind}(data)"
        raise InvalidArgument(f"{message}, or its URL as {kind}(url).", param="input", index=index)


def _names_file(text: str, endings: tuple[str, ...]) -> bool:
    if text.startswith(("http://", "https://")) and " " not in text:
        try:
            return urlsplit(text).path.lower().endswith(endings)
        except ValueError:
            return False
    return text.lower().endswith(endings) and os.path.isfile(text)
