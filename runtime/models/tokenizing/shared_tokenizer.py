"""A tokenizer that many threads share.

Truncation and padding are settings of a `tokenizers.Tokenizer`, not arguments of a call. Threads that set different
lengths on one tokenizer would silently get each other's. So this is a private copy on which neither is ever set. It
tokenizes only bare text; truncation and special tokens are list operations.

Batch calls are used even for one text: they release the GIL, the single call does not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeAlias

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from staged_pool.runtime.models.tokenizing.limits import check_characters
from staged_pool.runtime.models.tokenizing.long_texts import can_cut, encode_beginnings, without_middle
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError

Encoding: TypeAlias = Any
"""An encoding of `tokenizers`: `ids`, and if requested `offsets` (in characters) and `word_ids`."""


CALL_CHARACTERS: Final = 2**18
"""Approximate number of characters in one call for several texts."""


class SharedTokenizer:
    """A tokenizer whose methods may run in several threads at once.

    Args:
        tokenizer: Without truncation and padding. Nothing else may use or change it from now on.
    """

    tokenizer: Tokenizer

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._can_cut = can_cut(self.tokenizer)
        self._long_texts = threading.Lock()
        """Held by a call with more than `CALL_CHARACTERS` characters, which needs hundreds of megabytes."""

    def encode(
        self, texts: Sequence[str], wanted: Sequence[int | None] | None = None, *, offsets: bool = False
    ) -> list[Encoding]:
        """Encode texts without special tokens.

        Args:
            texts: Valid Unicode.
            wanted: Number of leading tokens needed of each text; a long text may get no more. None: all.
            offsets: Compute `offsets` and `word_ids` too, at a small cost.

        Raises:
            InvalidInput: A text is too long, see `check_characters`.
        """
        call = partial(self._encode_whole, offsets=offsets)
        if wanted is None or not self._can_cut or not any(wanted):
            return call(texts)
        return encode_beginnings(call, texts, wanted)

    def encode_ids(self, texts: Sequence[str], wanted: Sequence[int | None] | None = None) -> list[TokenIds]:
        """Encode texts to ids without special tokens, in calls of about `CALL_CHARACTERS` characters.

        An `Encoding` takes many times the memory of its ids, so only the ids are kept between calls.

        Args:
            texts: See `encode`.
            wanted: See `encode`.

        Returns:
            The ids of each text.

        Raises:
            InvalidInput: See `encode`.
        """
        ids: list[TokenIds] = []
        start = characters = 0
        for end, text in enumerate(texts):
            if characters and characters + len(text) > CALL_CHARACTERS:
                ids += self._ids_of(texts[start:end], wanted and wanted[start:end])
                start, characters = end, 0
            characters += len(text)
        return ids + self._ids_of(texts[start:], wanted and wanted[start:])

    def _ids_of(self, texts: Sequence[str], wanted: Sequence[int | None] | None) -> list[TokenIds]:
        return [encoding.ids for encoding in self.encode(texts, wanted)] if texts else []

    def _encode_whole(self, texts: Sequence[str], *, offsets: bool) -> list[Encoding]:
        for text in texts:
            check_characters(text)
        call = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        is_long = sum(map(len, texts)) > CALL_CHARACTERS
        with self._long_texts if is_long else nullcontext():
            encodings: list[Encoding] = call(list(texts), add_special_tokens=False)
        return encodings

    def without_middle(self, text: str, start: int, end: int, tokens: int) -> str:
        """See `long_texts.without_middle`; returns the whole text if the tokenizer does not allow cuts."""
        if not self._can_cut:
            return text
        call = partial(self.tokenizer.encode_batch_fast, add_special_tokens=False)
        return without_middle(call, text, start, end, tokens)

    def ids(self, text: str) -> list[int]:
        """Encode one text to ids without special tokens."""
        return self.encode_ids([text])[0]


def copy_tokenizer(source: Tokenizer, *, lower_case: bool = False) -> SharedTokenizer:
    """Make a private copy of a folder's tokenizer.

    Args:
        source: The folder's tokenizer.
        lower_case: Lowercase texts before tokenization.

    Raises:
        ConfigError: The tokenizer cannot be written out, such as one with two tokens of the same id.
    """
    try:
        copy = Tokenizer.from_str(source.to_str())
    except Exception as error:  # the library raises no other class
        raise ConfigError(f"tokenizer.json: its tokens contradict each other: {error}") from error
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = source.encode_special_tokens  # `to_str` leaves this setting out
    if lower_case:
        given = copy.normalizer
        steps = [Lowercase(), *([given] if given is not None else [])]
        copy.normalizer = NormalizerSequence(steps)
    return SharedTokenizer(copy)


def common_prefix(ids: Sequence[int], prompt: Sequence[int] | None) -> int:
    """Count the leading tokens that a text shares with its prompt's own tokens.

    The prompt's last token may differ: a space at its end becomes part of the text's first word.

    Args:
        ids: Tokens of prompt and text together.
        prompt: Tokens of the prompt alone. None: there is no prompt.
    """
    if prompt is None:
        return 0
    pairs = zip(ids, prompt, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))
