"""Ask a language model about a pair: its template makes one text of query, document and instruction.

The answer is read behind the last token. So where the text is too long, tokens are dropped from the end of the
document, and what follows it stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from staged_pool.runtime.model import ModelInput, TokenIds, TokenSequence
from staged_pool.runtime.models.specs.model import PairTemplate
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate
from staged_pool.runtime.models.tokenizing.limits import InputLimits
from staged_pool.runtime.models.tokenizing.pending_pairs import (
    PairReading,
    begin_pair,
    cut_texts,
    no_room,
    prepared_pair,
)
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

    def __init__(self, template: PairTemplate, text: str) -> None:
        self._pieces = _FIELD.split(text)  # every other one is the name of a field
        self._instruction_format = template.instruction_format
        fields = self._pieces[1::2]
        for name in ("query", "document"):
            if fields.count(name) != 1:
                raise ConfigError(f"the template for pairs must have one field {{{name}}}, has {fields.count(name)}")
        self.takes_instruction = "instruction" in fields
        if self.takes_instruction and template.instruction is None:
            raise ConfigError("the template for pairs has a field {instruction}, and there is none to fill it with")

    def write(self, query: str, document: str, instruction: str | None) -> str:
        told = self._instruction_format.replace("{instruction}", instruction) if instruction else ""
        values = {"query": query, "document": document, "instruction": told}
        return "".join(values[piece] if n % 2 else piece for n, piece in enumerate(self._pieces))


class _ChatWriter:
    """Renders a chat template with a message for each text of a pair: of the roles that sentence-transformers'
    CrossEncoder gives them, or of others."""

    def __init__(self, template: PairTemplate, chat: ChatTemplate | None) -> None:
        if chat is None:
            raise ConfigError("the model needs a chat template for pairs, and its tokenizer has none")
        self._chat = chat
        self._roles = template.roles
        self._structured = template.structured
        self._strips = template.strips
        self._arguments = dict(template.arguments)
        self._add_generation_prompt = bool(self._arguments.pop("add_generation_prompt", False))
        try:
            for name, text in (("query", self.write(_MARK, "", None)), ("document", self.write("", _MARK, None))):
                if text.count(_MARK) != 1:
                    raise ConfigError(f"the chat template has {text.count(_MARK)} places for a {name}; one is needed")
            own_roles = "system" not in self._roles
            self.takes_instruction = own_roles and self.write("", "", _MARK) != self.write("", "", None)
        except InvalidInput as error:
            roles = " and ".join(self._roles)
            raise ConfigError(f"the chat template takes no messages of the roles {roles}") from error

    def write(self, query: str, document: str, instruction: str | None) -> str:
        texts = (query.strip(), document.strip()) if self._strips else (query, document)
        contents = dict(zip(self._roles, texts, strict=True))
        if instruction is not None and "system" not in contents:
            contents = {"system": instruction, **contents}
        messages: list[Mapping[str, object]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._structured else text}
            for role, text in contents.items()
        ]
        return self._chat.render(messages, add_generation_prompt=self._add_generation_prompt, arguments=self._arguments)


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
        self._writer = _ChatWriter(template, chat) if template.text is None else _FieldWriter(template, template.text)

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """What the device is to read for each pair, or what is wrong with it."""
        takes = self._writer.takes_instruction
        begun = [
            begin_pair(given, pair, self._limits, takes_instruction=takes, instruction=self._instruction)
            for given, pair in inputs
        ]
        cut_texts(self._shared, [reading for reading in begun if isinstance(reading, PairReading)])
        written = [self._write(reading) if isinstance(reading, PairReading) else reading for reading in begun]
        readings = [reading for reading in written if isinstance(reading, PairReading)]
        for reading, ids in zip(readings, self._shared.encode_ids([r.written for r in readings]), strict=True):
            reading.ids = ids
        return [self._finish(reading) if isinstance(reading, PairReading) else reading for reading in written]

    def _write(self, reading: PairReading) -> PairReading | InvalidInput:
        try:
            reading.written = self._writer.write(reading.query, reading.document, reading.instruction)
        except InvalidInput as error:
            return error
        limit = reading.limit if reading.side == "right" else None
        if limit is not None and len(reading.written) > _CHARACTERS_PER_TOKEN * limit:
            # Most of a document that is far too long is dropped in the end, and need not be tokenized.
            start, end = self._place(reading)
            reading.written = self._shared.without_middle(reading.written, start, end, limit)
        return reading

    def _finish(self, reading: PairReading) -> Prepared[TokenSequence] | InvalidInput:
        ids, limit = reading.ids, reading.limit
        tokens = len(ids) + len(self._special)
        try:
            if limit is None:
                self._limits.check_length(tokens)
            elif tokens > limit:
                ids = self._without_excess(reading, tokens - limit)
            return prepared_pair(reading, [*self._special.prefix, *ids, *self._special.suffix], self._limits)
        except InvalidInput as error:
            return error

    def _without_excess(self, reading: PairReading, excess: int) -> TokenIds:
        """The ids without so many of them at the end, or the beginning, of the document.

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
            raise no_room(len(ids) + len(self._special) - (after - first), reading.limit)
        if reading.side == "left":
            return ids[:first] + ids[first + excess :]
        return ids[: after - excess] + ids[after:]

    def _place(self, reading: PairReading) -> tuple[int, int]:
        """Where the document stands in the text, in characters; nowhere if the template changes with it."""
        marked = self._writer.write(reading.query, _MARK, reading.instruction)
        before, _, after = marked.partition(_MARK)
        written = reading.written
        if written.startswith(before) and written.endswith(after) and len(before) + len(after) <= len(written):
            return len(before), len(written) - len(after)
        return len(written), len(written)
