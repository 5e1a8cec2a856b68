"""Limits of an input: its length in tokens and characters, and its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from staged_pool.runtime.requests import MODEL_MAX, Side
from staged_pool.stages.errors import InvalidInput, InvalidSetting

T = TypeVar("T")

MAX_CHARACTERS: Final = 2**20
"""Longest text that is tokenized in one call, in characters.

A tokenizer needs up to 400 bytes of memory per character; `tests/hostile/test_bodies.py` bounds it.
"""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of one model."""

    max_tokens: int
    """Longest input in tokens, special tokens included."""
    vocabulary: int
    """Number of token ids: they run from 0 to `vocabulary` - 1."""
    truncation_side: Side = "right"
    """The end that is cut off unless the request names one."""

    def side(self, asked: Side | None) -> Side:
        """Return the end to cut off: the request's choice, or the model's default for None."""
        return self.truncation_side if asked is None else asked

    def check_length(self, tokens: int, *, is_all: bool = True) -> None:
        """Reject an input that is longer than the model's limit.

        Args:
            tokens: Number of tokens of the input, or of its tokenized beginning.
            is_all: True if the whole input was tokenized.

        Raises:
            InvalidInput: The input is too long.
        """
        if tokens > self.max_tokens:
            raise InvalidInput(
                f"This model's maximum context length is {self.max_tokens} tokens. However, your input contains "
                f"{'' if is_all else 'at least '}{tokens} tokens. Please reduce the length of the input prompt, "
                "or set $max_tokens.",
                param="input",
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Reject an input without tokens, or with an id outside the vocabulary.

        This applies to texts too: a tokenizer may have added tokens without a row in the weights.

        Raises:
            InvalidInput: The input has no tokens, or such an id.
        """
        if not ids:
            raise InvalidInput("The input has no tokens; it must have at least one.", param="input")
        if (lowest := min(ids)) < 0 or max(ids) >= self.vocabulary:
            wrong = lowest if lowest < 0 else max(ids)
            raise InvalidInput(f"Token id {wrong} is out of vocabulary", param="input")


def token_limit(max_tokens: int | None, model_max_tokens: int) -> int | None:
    """Resolve `TextInput.max_tokens` for a model with this limit. None: do not truncate.

    Raises:
        InvalidSetting: `max_tokens` exceeds the model's limit, or is below `MODEL_MAX`.
    """
    if max_tokens is None:
        return None
    if max_tokens == MODEL_MAX:
        return model_max_tokens
    if max_tokens > model_max_tokens:
        raise InvalidSetting(
            "$max_tokens value is greater than max_model_len. Please request a smaller truncation size.",
            param="max_tokens",
        )
    if max_tokens < 0:
        raise InvalidSetting(f"$max_tokens must be at least {MODEL_MAX}.", param="max_tokens")
    return max_tokens


def truncated(tokens: list[T], room: int | None, side: Side) -> list[T]:
    """Cut a list of tokens at one end.

    Args:
        tokens: The tokens, or one value per token.
        room: Number of tokens to keep. None: all.
        side: The end that is cut off.
    """
    if room is None or room >= len(tokens):
        return tokens
    return tokens[:room] if side == "right" else tokens[len(tokens) - room :]


def check_own_limit(max_own_tokens: int | None) -> int | None:
    """Check a limit on a text's own tokens, without prompt and special tokens.

    Raises:
        InvalidSetting: The limit is negative.
    """
    if max_own_tokens is not None and max_own_tokens < 0:
        raise InvalidSetting("A limit on the tokens of a text must be at least 0.", param="max_tokens")
    return max_own_tokens


def check_text(text: str) -> None:
    """Reject a text that UTF-8 cannot encode.

    Raises:
        InvalidInput: The text has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "The input is not valid Unicode: it has half of a surrogate pair."
        raise InvalidInput(message, param="input") from None


def check_characters(text: str) -> None:
    """Reject a text that is too long for one call of the tokenizer.

    Raises:
        InvalidInput: The text is longer than `MAX_CHARACTERS`.
    """
    if len(text) > MAX_CHARACTERS:
        message = (
            f"A text has {len(text)} characters; at most {MAX_CHARACTERS} are tokenized. Please send its beginning."
        )
        raise InvalidInput(message, param="input")


def too_long_error(limit: int) -> InvalidInput:
    """Error for an input that is longer than its limit although `TextInput.must_fit` forbids truncation."""
    message = f"The input has more than {limit} tokens, and truncation is off. Please reduce its length."
    return InvalidInput(message, param="input")
