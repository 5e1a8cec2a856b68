"""Ask a language model about a pair: its template makes one text of query, document and instruction.

The answer is read behind the last token. So where the text is too long, tokens are dropped from the end of the
document, and what follows it stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from staged_pool.runtime.model import ModelInput, TokenIds, TokenSequence
from staged_pool.runtime.models.specs import PairTemplate
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate
from staged_pool.runtime.models.tokenizing.limits import InputLimits, check_text, own_limit, token_limit
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.requests import PairInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

_FIELD: Final = re.compile(r"\{(instruction|query|document)\}")

_CHARACTERS_PER_TOKEN: Final = 16
"""A text of so many is far too long."""

_MARK: Final = "\U000f5afe\U000f1d0c\U000f5afe"
"""Stands for a document where its place is looked for: private characters, which no template changes."""


class _FieldWriter:
    """Fills the fields of a template that is a text."""

    def __init__(self, template: str, instruction: str | None) -> None:
        self._pieces = _FIELD.split(template)  # every other one is the name of a field
        fields = self._pieces[1::2]
        for name in ("query", "document"):
            if fields.count(name) != 1:
                raise ConfigError(f"the template for pairs must have one field {{{name}}}, has {fields.count(name)}")
        self.takes_instruction = "instruction" in fields
        if self.takes_instruction and instruction is None:
            raise ConfigError("the template for pairs has a field {instruction}, and there is none to fill it with")

    def write(self, query: str, document: str, instruction: str | None) -> str:
        values = {"query": query, "document": document, "instruction": instruction or ""}
        return "".join(values[piece] if n % 2 else piece for n, piece in enumerate(self._pieces))


class _ChatWriter:
    """Renders a chat template with messages of the roles that sentence-transformers' CrossEncoder gives a pair."""

    def __init__(self, template: PairTemplate, chat: ChatTemplate | None) -> None:
        if chat is None:
            raise ConfigError("the model needs a chat template for pairs, and its tokenizer has none")
        self._chat = chat
        self._structured = template.structured
        self._arguments = template.arguments
        try:
            for name, text in (("query", self.write(_MARK, "", None)), ("document", self.write("", _MARK, None))):
                if text.count(_MARK) != 1:
                    raise ConfigError(f"the chat template has {text.count(_MARK)} places for a {name}; one is needed")
            self.takes_instruction = self.write("", "", _MARK) != self.write("", "", None)
        except InvalidInput as error:
            raise ConfigError("the chat template takes no messages of the roles query and document") from error

    def write(self, query: str, document: str, instruction: str | None) -> str:
        contents = {"query": query, "document": document}
        if instruction is not None:
            contents = {"system": instruction, **contents}
        messages: list[Mapping[str, object]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._structured else text}
            for role, text in contents.items()
        ]
        return self._chat.render(messages, arguments=self._arguments)


@dataclass(slots=True)
class _Reading:
    """One pair on its way."""

    given: ModelInput
    query: str
    document: str
    max_query_tokens: int | None
    max_document_tokens: int | None
    instruction: str | None
    limit: int | None
    written: str = ""
    ids: TokenIds = field(default_factory=list)


class TemplateReader:
    """What `TextTokenizer` does with pairs of a model that has a `PairTemplate`.

    `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: What goes around a text.
        limits: The model's.
        template: How a pair becomes one text.
        chat: The tokenizer's chat template, if it has one.

    Raises:
        ConfigError: The template has no place for a query or a document, or more than one.
    """

    def __init__(
        self,
        shared: SharedTokenizer,
        special: SpecialTokens,
        limits: InputLimits,
        *,
        template: PairTemplate,
        chat: ChatTemplate | None,
    ) -> None:
        self._shared = shared
        self._special = special if template.add_special_tokens else SpecialTokens([], [])
        self._limits = limits
        self._instruction = template.instruction
        self._writer = (
            _ChatWriter(template, chat) if template.text is None else _FieldWriter(template.text, template.instruction)
        )

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """What the device is to read for each pair, or what is wrong with it."""
        begun = [self._begin(given, pair) for given, pair in inputs]
        self._cut_texts([reading for reading in begun if isinstance(reading, _Reading)])
        written = [self._write(reading) if isinstance(reading, _Reading) else reading for reading in begun]
        readings = [reading for reading in written if isinstance(reading, _Reading)]
        for reading, encoding in zip(readings, self._shared.encode([r.written for r in readings]), strict=True):
            reading.ids = encoding.ids
        return [self._finish(reading) if isinstance(reading, _Reading) else reading for reading in written]

    def _begin(self, given: ModelInput, pair: PairInput) -> _Reading | InvalidInput:
        try:
            if pair.instruction is not None and not self._writer.takes_instruction:
                raise InvalidInput("The model takes no $instruction.", param="instruction")
            limit = token_limit(pair.max_tokens, self._limits.max_tokens)
            max_query_tokens = own_limit(pair.max_first_tokens)
            max_document_tokens = own_limit(pair.max_second_tokens)
            # A prompt takes the place of the instruction, as in sentence-transformers.
            instruction = next(
                (text for text in (pair.instruction, given.prompt or None) if text is not None), self._instruction
            )
            for text in (pair.first, pair.second, instruction or ""):
                check_text(text)
        except InvalidInput as error:
            return error
        return _Reading(given, pair.first, pair.second, max_query_tokens, max_document_tokens, instruction, limit)

    def _cut_texts(self, readings: Sequence[_Reading]) -> None:
        """Cut queries and documents to so many tokens of their own, as texts: what is dropped is never written."""
        some = [reading for reading in readings if reading.max_query_tokens is not None]
        queries = self._beginnings([(r.query, r.max_query_tokens) for r in some])
        for reading, query in zip(some, queries, strict=True):
            reading.query = query
        some = [reading for reading in readings if reading.max_document_tokens is not None]
        documents = self._beginnings([(r.document, r.max_document_tokens) for r in some])
        for reading, document in zip(some, documents, strict=True):
            reading.document = document

    def _beginnings(self, texts: Sequence[tuple[str, int | None]]) -> list[str]:
        """The beginning of each text that so many tokens stand for."""
        if not texts:
            return []
        encodings = self._shared.encode([text for text, _ in texts], [tokens for _, tokens in texts], offsets=True)
        return [
            text[: max((stop for _, stop in encoding.offsets[:tokens]), default=0)]
            for (text, tokens), encoding in zip(texts, encodings, strict=True)
        ]

    def _write(self, reading: _Reading) -> _Reading | InvalidInput:
        try:
            reading.written = self._writer.write(reading.query, reading.document, reading.instruction)
        except InvalidInput as error:
            return error
        if reading.limit is not None and len(reading.written) > _CHARACTERS_PER_TOKEN * reading.limit:
            # Most of a document that is far too long is dropped in the end, and need not be tokenized.
            start, end = self._place(reading)
            reading.written = self._shared.without_middle(reading.written, start, end, reading.limit)
        return reading

    def _finish(self, reading: _Reading) -> Prepared[TokenSequence] | InvalidInput:
        ids, limit = reading.ids, reading.limit
        tokens = len(ids) + len(self._special)
        try:
            if limit is None:
                self._limits.check_length(tokens)
            elif tokens > limit:
                ids = self._without_end(reading, tokens - limit)
            ids = [*self._special.prefix, *ids, *self._special.suffix]
            self._limits.check_ids(ids)
        except InvalidInput as error:
            return error
        return Prepared(TokenSequence(ids, reading.given.outputs), cost=len(ids), batch_key=reading.given.outputs)

    def _without_end(self, reading: _Reading, excess: int) -> TokenIds:
        """The ids without so many of them at the end of the document.

        A token that stands for the end of the document and for the beginning of what follows counts to the latter.

        Raises:
            InvalidInput: The document has fewer.
        """
        start, end = self._place(reading)
        (encoding,) = self._shared.encode([reading.written], offsets=True)
        ids: TokenIds = encoding.ids
        stops = [stop for _, stop in encoding.offsets]
        first = next((place for place, stop in enumerate(stops) if stop > start), len(ids))
        after = next((place for place, stop in enumerate(stops) if stop > end), len(ids))
        if after - first < excess:
            left = len(ids) + len(self._special) - (after - first)
            raise InvalidInput(
                f"What the model reads beside the document takes {left} tokens, which is more than the limit of "
                f"{reading.limit}. Please shorten the query or the instruction, or raise the limit.",
                param="input",
            )
        return ids[: after - excess] + ids[after:]

    def _place(self, reading: _Reading) -> tuple[int, int]:
        """Where the document stands in the text, in characters; nowhere if the template changes with it."""
        marked = self._writer.write(reading.query, _MARK, reading.instruction)
        before, _, after = marked.partition(_MARK)
        written = reading.written
        if written.startswith(before) and written.endswith(after) and len(before) + len(after) <= len(written):
            return len(before), len(written) - len(after)
        return len(written), len(written)
