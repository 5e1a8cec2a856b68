"""One tokenizer for many threads.

Truncation and padding are settings of a `tokenizers.Tokenizer`, not arguments of a call: threads that ask
one tokenizer for different lengths silently get each other's. So the tokenizer here is a private copy on which
neither is ever set. It only tokenizes the bare text; cutting and adding special tokens are list operations.

The batch calls are used even for one text: they release the GIL, the single call does not.
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

from staged_pool.runtime.model import TokenIds
from staged_pool.runtime.models.tokenizing.limits import check_characters
from staged_pool.runtime.models.tokenizing.long_texts import can_cut, encode_beginnings, without_middle

Encoding: TypeAlias = Any
"""Of `tokenizers`: `ids`, and where they were asked for `offsets` (in characters) and `word_ids`."""


PORTION: Final = 2**18
"""Characters of several texts that are tokenized in one call, about."""


class SharedTokenizer:
    """A tokenizer whose methods may run in several threads at once, on texts that are valid Unicode.

    Args:
        source: A tokenizer as its model's author set it up; it is copied.
        lower_case: Whether text is lowercased before anything else is done to it.
    """

    tokenizer: Tokenizer
    """To read from; its settings must stay as they are."""

    def __init__(self, source: Tokenizer, *, lower_case: bool = False) -> None:
        self.tokenizer = Tokenizer.from_str(source.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = source.encode_special_tokens  # which is not in the text of a tokenizer
        if lower_case:
            given = self.tokenizer.normalizer
            steps = [Lowercase(), *([given] if given is not None else [])]
            self.tokenizer.normalizer = NormalizerSequence(steps)
        self._can_cut = can_cut(self.tokenizer)
        self._long_texts = threading.Lock()
        """Held while more than `PORTION` characters are tokenized, which takes hundreds of megabytes."""

    def encode(
        self, texts: Sequence[str], wanted: Sequence[int | None] | None = None, *, offsets: bool = False
    ) -> list[Encoding]:
        """What the tokenizer makes of each bare text.

        Args:
            texts: Valid Unicode.
            wanted: For each text how many of its leading tokens are looked at; a long text may give no more than
                that. None: all.
            offsets: Whether `offsets` and `word_ids` are needed, which cost a little.

        Raises:
            InvalidInput: A text is too long for that, see `check_characters`.
        """
        call = partial(self._encode_whole, offsets=offsets)
        if wanted is None or not self._can_cut or not any(wanted):
            return call(texts)
        return encode_beginnings(call, texts, wanted)

    def encode_ids(self, texts: Sequence[str], wanted: Sequence[int | None] | None = None) -> list[TokenIds]:
        """Tokenize bare texts, in calls of about `PORTION` characters.

        An `Encoding` takes many times the memory of its ids, which are all that is kept from one call to the next.

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
            if characters and characters + len(text) > PORTION:
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
        is_long = sum(map(len, texts)) > PORTION
        with self._long_texts if is_long else nullcontext():
            encodings: list[Encoding] = call(list(texts), add_special_tokens=False)
        return encodings

    def without_middle(self, text: str, start: int, end: int, tokens: int) -> str:
        """See `long_texts.without_middle`; the text itself where that does not hold for this tokenizer."""
        if not self._can_cut:
            return text
        call = partial(self.tokenizer.encode_batch_fast, add_special_tokens=False)
        return without_middle(call, text, start, end, tokens)

    def ids(self, text: str) -> list[int]:
        """The ids of one bare text."""
        return self.encode_ids([text])[0]


def shared_beginning(ids: Sequence[int], prompt: Sequence[int] | None) -> int:
    """How many of a prompted text's tokens are the prompt's: those that it has when it stands alone, too.

    The last ones may not be: the blank that ends a prompt becomes part of the text's first word.
    """
    if prompt is None:
        return 0
    pairs = zip(ids, prompt, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))
