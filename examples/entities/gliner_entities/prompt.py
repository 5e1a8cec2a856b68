"""Prompt of a text: its labels, each behind a mark, and its words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from gliner_entities.settings import GlinerSettings
from staged_pool import ConfigError, InvalidInput

_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")
"""A word, with its hyphens, or another mark: the splitter "whitespace" of the library gliner."""

MAX_TOKENS: Final = 2048
"""Most tokens of a prompt, for encoders whose positions have no end. Attention takes their square."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of one text, and the places of its labels and words in them."""

    ids: list[int]
    labels: tuple[int, ...]
    """Place of the token whose vector is that of each label."""
    words: tuple[int | None, ...]
    """Place of the first token of each word. None: the tokenizer drops the word."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text: its first character, and the one after its last."""

    start: int
    end: int


def split_words(text: str) -> list[Word]:
    """Split a text into words and marks."""
    return [Word(*found.span()) for found in _WORD.finditer(text)]


class PromptWriter:
    """Writes prompts by the tokenizer of a folder. Thread-safe.

    Args:
        folder: The folder.
        settings: Its settings.
        max_tokens: Rows of the encoder's position table. None: positions have no end.

    Raises:
        ConfigError: The tokenizer is missing, or does not know the marks of the prompt.
    """

    def __init__(self, folder: Path, settings: GlinerSettings, max_tokens: int | None) -> None:
        self._settings = settings
        self._max_tokens = min(max_tokens or MAX_TOKENS, MAX_TOKENS)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder}: tokenizer.json is missing: save the tokenizer of the encoder into the folder")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"tokenizer.json: cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token in (settings.label_token, settings.end_token):
            if (known := self._tokenizer.token_to_id(token)) is None:
                raise ConfigError(f"tokenizer.json: {token} is missing, which marks the labels of a prompt")
            if token == settings.label_token and known != settings.label_token_id:
                raise ConfigError(
                    f"gliner_config.json: class_token_index={settings.label_token_id}, but tokenizer.json has {token} "
                    f"as {known}"
                )

    def check_labels(self, labels: Sequence[str]) -> None:
        """Reject labels with a mark of the prompt in them.

        Raises:
            InvalidInput: Names the first.
        """
        for place, label in enumerate(labels):
            if self._settings.label_token in label or self._settings.end_token in label:
                raise InvalidInput(
                    f"data.labels[{place}] must not contain {self._settings.label_token} or {self._settings.end_token}",
                    param=f"data.labels[{place}]",
                )

    def write(self, text: str, words: Sequence[Word], labels: Sequence[str], place: str) -> Prompt:
        """Write the prompt of a text.

        Args:
            text: The text.
            words: Its words; see `split_words`.
            labels: At least one label, all different.
            place: Field of the text, for errors.

        Raises:
            InvalidInput: The text is too long for the model.
        """
        settings = self._settings
        if len(words) > settings.max_words:
            raise InvalidInput(
                f"{place} has {len(words)} words and marks: the model reads at most {settings.max_words}. Please split "
                "it, for example into paragraphs.",
                param=place,
            )
        written = [part for label in labels for part in (settings.label_token, label)]
        written += [settings.end_token, *(text[word.start : word.end] for word in words)]
        encoded = self._tokenizer.encode_batch([written], is_pretokenized=True)[0]  # one text: the lock is released
        if len(encoded.ids) > self._max_tokens:
            raise InvalidInput(
                f"{place} and the labels have {len(encoded.ids)} tokens: the model reads at most {self._max_tokens}.",
                param=place,
            )
        first: dict[int, int] = {}
        for token, word in enumerate(encoded.word_ids):
            if word is not None:
                first.setdefault(word, token)
        after = 0 if settings.reads_label_token else 1
        return Prompt(
            ids=encoded.ids,
            labels=tuple(first[2 * number] + after for number in range(len(labels))),
            words=tuple(first.get(2 * len(labels) + 1 + number) for number in range(len(words))),
        )
