"""What an input must keep to: how long it may be, and which ids the model knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from staged_pool.runtime.requests import MODEL_MAX, Side
from staged_pool.stages.errors import InvalidInput, InvalidSetting

T = TypeVar("T")

MOST_CHARACTERS: Final = 2**20
"""Of a text that is tokenized in one go: a tokenizer takes up to 400 bytes of memory for each."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of one model."""

    max_tokens: int
    """Longest input, special tokens included."""
    vocabulary: int
    """Token ids run from 0 to one less."""
    truncation_side: Side = "right"
    """The end that is cut off where a request does not say it."""

    def side(self, asked: Side | None) -> Side:
        """The end that is cut off an input of a request that asks for this one; None: it does not say."""
        return self.truncation_side if asked is None else asked

    def check_length(self, tokens: int, *, is_all: bool = True) -> None:
        """Reject an input that is not to be cut and is longer than the model takes.

        Args:
            tokens: Of the input, or of as much of it as was tokenized.
            is_all: All of the input was tokenized.

        Raises:
            InvalidInput: It is longer.
        """
        if tokens > self.max_tokens:
            raise InvalidInput(
                f"This model's maximum context length is {self.max_tokens} tokens. However, your input contains "
                f"{'' if is_all else 'at least '}{tokens} tokens. Please reduce the length of the input prompt, "
                "or set $max_tokens.",
                param="input",
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises `InvalidInput` for an input without tokens, or with one that the model does not know.

        Also for texts: a tokenizer may know added tokens that the weights have no row for.
        """
        if not ids:
            raise InvalidInput("The input has no tokens; it must have at least one.", param="input")
        if (lowest := min(ids)) < 0 or max(ids) >= self.vocabulary:
            wrong = lowest if lowest < 0 else max(ids)
            raise InvalidInput(f"Token id {wrong} is out of vocabulary", param="input")


def token_limit(max_tokens: int | None, model_max_tokens: int) -> int | None:
    """How many tokens a `TextInput.max_tokens` allows on a model that takes so many. None: never cut.

    Raises:
        InvalidSetting: More than the model takes, or less than `MODEL_MAX`.
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


def kept(tokens: list[T], room: int | None, side: Side) -> list[T]:
    """The tokens that are left of a text.

    Args:
        tokens: All of them, or something of each.
        room: How many may be left. None: all.
        side: The end that is cut off.
    """
    if room is None or room >= len(tokens):
        return tokens
    return tokens[:room] if side == "right" else tokens[len(tokens) - room :]


def own_limit(max_own_tokens: int | None) -> int | None:
    """A limit on a text's own tokens, which is not one on what the model reads.

    Raises:
        InvalidSetting: It is negative.
    """
    if max_own_tokens is not None and max_own_tokens < 0:
        raise InvalidSetting("A limit on the tokens of a text must be at least 0.", param="max_tokens")
    return max_own_tokens


def check_text(text: str) -> None:
    """Raises `InvalidInput` for a text that UTF-8 cannot express: one with a lone half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "The input is not valid Unicode: it holds half of a surrogate pair."
        raise InvalidInput(message, param="input") from None


def check_characters(text: str) -> None:
    """Reject a text that is too long to be tokenized in one go.

    Raises:
        InvalidInput: It is longer than `MOST_CHARACTERS`.
    """
    if len(text) > MOST_CHARACTERS:
        message = (
            f"A text has {len(text)} characters; at most {MOST_CHARACTERS} are tokenized. Please send its beginning."
        )
        raise InvalidInput(message, param="input")


def not_to_be_cut(limit: int) -> InvalidInput:
    """The rejection of an input with `TextInput.must_fit` that is longer."""
    message = f"The input has more than {limit} tokens, and is not to be cut. Please reduce its length."
    return InvalidInput(message, param="input")
