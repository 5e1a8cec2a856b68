"""Types that look like inputs of a call and are none: bytes, dictionaries, sets, paths, arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MappingView, Set

from staged_pool.stages.errors import InvalidInput

_TEXTS = "UOT"
"""Kinds of numpy's types whose values are texts or objects."""
_MEDIA = frozenset({"image", "image_url", "video", "video_url"})
"""Keys of objects that are inputs over HTTP, and in sentence-transformers."""


def of_type(given: object) -> str:
    """Return the end of a sentence on a wrong value: its type, and how to pass it instead."""
    way_out = _way_out(given)
    return f"of type {type(given).__name__}." + (f" {way_out}" if way_out else "")


def several(name: str, given: object, wanted: str) -> Iterable[object]:
    """Return the unchecked values of a list, an iterator or an array of texts.

    Args:
        name: The argument, by the name of errors.
        given: Its value.
        wanted: The right types, for the message.

    Raises:
        InvalidInput: It is something else, or iterates over what nobody means: the keys of a dictionary, a set in any
            order, the numbers of bytes, the names of columns.
    """
    if not isinstance(given, Iterable) or (not _is_array_of_texts(given) and _way_out(given) is not None):
        raise InvalidInput(f"{name} must be {wanted}, not {of_type(given)}", param=name)
    return given


def _way_out(given: object) -> str | None:
    """Return the way to pass a value of a wrong type; None: its type says nothing.

    Types of other packages are known by their attributes, so that none of these packages is imported.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return "Decode a text, as in `data.decode()`; wrap the file of an image, as in `Image(data)`."
    if isinstance(given, os.PathLike):
        return "Pass the text of the file, `path.read_text()`, or its image, `Image(path.read_bytes())`."
    if isinstance(given, Mapping) and not _MEDIA.isdisjoint(given):
        return "Pass an image as `Image(data)`; with a text it is one `Chat`, whose content is `(Image(data), text)`."
    if isinstance(given, Mapping):
        return "Pass a list of its values, such as `list(given.values())`; a conversation is a `Chat`."
    if isinstance(given, Set) and not isinstance(given, MappingView):
        return "A set has no order: pass a list, such as `sorted(given)`."
    if type(given).__module__.partition(".")[0] == "PIL":
        return "Pass the file of the image, as in `Image(path.read_bytes())`."
    if hasattr(given, "columns"):  # a table of pandas, polars or pyarrow
        return "Pass one column, such as `table['text'].to_list()`."
    if getattr(getattr(given, "dtype", None), "kind", None) == "S":
        return "Decode its texts, as in `numpy.char.decode(given)`."
    if hasattr(given, "tolist"):  # an array of numpy, torch and others
        return "Pass texts and token ids as lists, such as `given.tolist()`; wrap the file of an image in `Image`."
    return None


def _is_array_of_texts(given: object) -> bool:
    kind = getattr(getattr(given, "dtype", None), "kind", None)
    return kind is not None and kind in _TEXTS and getattr(given, "ndim", 1) > 0
