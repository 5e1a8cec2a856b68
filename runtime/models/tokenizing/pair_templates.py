"""Pairs rendered by a template into one text, for LLM rerankers.

The score is read after the last token. So a prompt that is too long loses tokens of its document, never the text after
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate, message_part
from staged_pool.runtime.models.tokenizing.limits import InputLimits
from staged_pool.runtime.models.tokenizing.pending_pairs import (
    PendingPair,
    begin_pair,
    no_room_error,
    prepared_pair,
    truncate_texts,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Image, ImagePair, PairInput, Parts, Side, Video
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

_FIELD: Final = re.compile(r"\{(instruction|query|document)\}")

_CHARACTERS_PER_TOKEN: Final = 16
"""Characters per allowed token beyond which a text is shortened before it is tokenized."""

_MARK: Final = "\U000f5afe\U000f1d0c\U000f5afe"
"""Placeholder that locates a text in the rendered prompt: private characters, which no template changes."""


class _FieldWriter:
    """Renders a text template by its fields."""

    def __init__(self, template: PairTemplate, text: str) -> None:
        self._empty = template.empty
        self._image, self._video = template.image, template.video
        self._pieces = _FIELD.split(text)  # every other one is the name of a field
        self._instruction_format = template.instruction_format
        fields = self._pieces[1::2]
        for name in ("query", "document"):
            if fields.count(name) != 1:
                raise ConfigError(f"the template for pairs must have one field {{{name}}}, has {fields.count(name)}")
        self.takes_instruction = "instruction" in fields
        if self.takes_instruction and template.instruction is None:
            raise ConfigError("the template for pairs has a field {instruction}, but there is no default instruction")

    def write(self, query: str | Parts, document: str | Parts, instruction: str | None) -> str:
        instruction_text = self._instruction_format.replace("{instruction}", instruction) if instruction else ""
        values = {"query": self._text(query), "document": self._text(document), "instruction": instruction_text}
        return "".join(values[piece] if n % 2 else piece for n, piece in enumerate(self._pieces))

    def _text(self, content: str | Parts) -> str:
        if not isinstance(content, str):
            content = "".join(part if isinstance(part, str) else self._place_of(part) for part in content)
        return content or self._empty

    def _place_of(self, part: Image) -> str:
        kind, text = ("videos", self._video) if isinstance(part, Video) else ("images", self._image)
        if text is None:
            raise InvalidInput(f"The model's prompt for pairs has no place for {kind}.", param="input")
        return text


class _ChatWriter:
    """Renders a chat template with one message per text of a pair.

    The roles are those of sentence-transformers' CrossEncoder, or others that the template names.
    """

    def __init__(self, template: PairTemplate, chat: ChatTemplate | None) -> None:
        if chat is None:
            raise ConfigError("the model needs a chat template for pairs, but its tokenizer has none")
        self._chat = chat
        self._roles = template.roles
        self._structured = template.structured
        self._strips = template.strips
        self._arguments = dict(template.arguments)
        self._add_generation_prompt = bool(self._arguments.pop("add_generation_prompt", False))
        try:
            for name, text in (("query", self.write(_MARK, "", None)), ("document", self.write("", _MARK, None))):
                if text.count(_MARK) != 1:
                    raise ConfigError(
                        f"the chat template has {text.count(_MARK)} places for a {name}; it must have one"
                    )
            own_roles = "system" not in self._roles
            self.takes_instruction = own_roles and self.write("", "", _MARK) != self.write("", "", None)
        except InvalidInput as error:
            roles = " and ".join(self._roles)
            raise ConfigError(f"the chat template does not accept messages of the roles {roles}") from error

    def write(self, query: str | Parts, document: str | Parts, instruction: str | None) -> str:
        contents = dict(zip(self._roles, (query, document), strict=True))
        if instruction is not None and "system" not in contents:
            contents = {"system": instruction, **contents}
        messages: list[Mapping[str, object]] = [
            {"role": role, "content": self._content(content, strips=self._strips and role in self._roles)}
            for role, content in contents.items()
        ]
        return self._chat.render(messages, add_generation_prompt=self._add_generation_prompt, arguments=self._arguments)

    def _content(self, content: str | Parts, *, strips: bool) -> object:
        """Return the content of a message in the form that the template takes."""
        if isinstance(content, str):
            text = content.strip() if strips else content
            return [{"type": "text", "text": text}] if self._structured else text
        return [message_part(part) for part in content]


@dataclass(frozen=True, slots=True)
class DraftedPair:
    """A tokenized pair with one token for each image."""

    ids: TokenIds
    first: int
    """Index of the document's first token."""
    after: int
    """Index of the first token after the document."""
    limit: int | None
    """Limit of the whole sequence, in tokens. None: do not cut."""
    side: Side
    """The end of the document that is cut off."""
    document_first: bool
    """The document stands before the query."""


class TemplateReader:
    """Tokenizer of pairs by a `PairTemplate`. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: The special tokens around a text.
        limits: The model's limits.
        template: The template of a pair.
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
        special = special if template.add_special_tokens else SpecialTokens([], [])
        self._special = SpecialTokens(special.prefix, [*special.suffix, *template.end])
        self._limits = limits
        self._instruction = template.instruction
        self._writer = _ChatWriter(template, chat) if template.text is None else _FieldWriter(template, template.text)

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """Tokenize each pair, or return the error of its request."""
        takes = self._writer.takes_instruction
        begun = [
            begin_pair(given, pair, self._limits, takes_instruction=takes, instruction=self._instruction)
            for given, pair in inputs
        ]
        truncate_texts(self._shared, [entry for entry in begun if isinstance(entry, PendingPair)])
        written = [self._write(entry) if isinstance(entry, PendingPair) else entry for entry in begun]
        entries = [entry for entry in written if isinstance(entry, PendingPair)]
        for entry, ids in zip(entries, self._shared.encode_ids([r.written for r in entries]), strict=True):
            entry.ids = ids
        return [self._finish(entry) if isinstance(entry, PendingPair) else entry for entry in written]

    def draft(self, given: ModelInput, pair: ImagePair, rewrite: Callable[[str], str] = str) -> DraftedPair:
        """Tokenize a pair with images, in which one token stands for each image.

        Args:
            given: The input.
            pair: Its source.
            rewrite: Changes the rendered text. It gets the parts before, of and after the document, in this order.

        Raises:
            InvalidInput: The pair does not fit the template.
        """
        if pair.max_first_tokens is not None or pair.max_second_tokens is not None:
            raise InvalidInput(
                "A limit on the tokens of a query or a document is for texts, and this pair has images.",
                param="max_tokens",
            )
        texts = PairInput(
            first=_joined(pair.first),
            second=_joined(pair.second),
            max_tokens=pair.max_tokens,
            truncate_side=pair.truncate_side,
            instruction=pair.instruction,
        )
        takes = self._writer.takes_instruction
        entry = begin_pair(given, texts, self._limits, takes_instruction=takes, instruction=self._instruction)
        if isinstance(entry, InvalidInput):
            raise entry
        written = self._writer.write(pair.first, pair.second, entry.instruction)
        start, end = self._place(pair.first, written, entry.instruction)
        before, document, rest = map(rewrite, (written[:start], written[start:end], written[end:]))
        (encoding,) = self._shared.encode([before + document + rest], offsets=True)
        first, after = _tokens_between(encoding.offsets, len(before), len(before) + len(document))
        prefix = self._special.prefix
        return DraftedPair(
            [*prefix, *encoding.ids, *self._special.suffix],
            first + len(prefix),
            after + len(prefix),
            entry.limit,
            entry.side,
            document_first=self._document_first(entry.instruction),
        )

    def _document_first(self, instruction: str | None) -> bool:
        query, document = f"{_MARK}1", f"{_MARK}2"
        written = self._writer.write(query, document, instruction)
        return written.find(document) < written.find(query)

    def _write(self, entry: PendingPair) -> PendingPair | InvalidInput:
        try:
            entry.written = self._writer.write(entry.query, entry.document, entry.instruction)
        except InvalidInput as error:
            return error
        limit = entry.limit if entry.side == "right" else None
        if limit is not None and len(entry.written) > _CHARACTERS_PER_TOKEN * limit:
            # Most of a far too long document would be cut anyway, so it is not tokenized.
            start, end = self._place(entry.query, entry.written, entry.instruction)
            entry.written = self._shared.without_middle(entry.written, start, end, limit)
        return entry

    def _finish(self, entry: PendingPair) -> Prepared[TokenSequence] | InvalidInput:
        ids, limit = entry.ids, entry.limit
        tokens = len(ids) + len(self._special)
        try:
            if limit is None:
                self._limits.check_length(tokens)
            elif tokens > limit:
                ids = self._without_excess(entry, tokens - limit)
            return prepared_pair(entry, [*self._special.prefix, *ids, *self._special.suffix], self._limits)
        except InvalidInput as error:
            return error

    def _without_excess(self, entry: PendingPair, excess: int) -> TokenIds:
        """Remove `excess` tokens from the end or the beginning of the document, by `entry.side`.

        A token that covers both the end of the document and the text after it is never removed.

        Raises:
            InvalidInput: The document has fewer tokens.
        """
        start, end = self._place(entry.query, entry.written, entry.instruction)
        (encoding,) = self._shared.encode([entry.written], offsets=True)
        ids: TokenIds = encoding.ids
        first, after = _tokens_between(encoding.offsets, start, end)
        if after - first < excess:
            raise no_room_error(len(ids) + len(self._special) - (after - first), entry.limit)
        if entry.side == "left":
            return ids[:first] + ids[first + excess :]
        return ids[: after - excess] + ids[after:]

    def _place(self, query: str | Parts, written: str, instruction: str | None) -> tuple[int, int]:
        """Locate the document in the rendered text, as start and end in characters.

        If the template's other text depends on the document, the range is empty, at the end.
        """
        marked = self._writer.write(query, _MARK, instruction)
        before, _, after = marked.partition(_MARK)
        if written.startswith(before) and written.endswith(after) and len(before) + len(after) <= len(written):
            return len(before), len(written) - len(after)
        return len(written), len(written)


def _joined(parts: Parts) -> str:
    """Join the texts of a content."""
    return "".join(part for part in parts if isinstance(part, str))


def _tokens_between(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the tokens that begin and end within these characters, as first and end."""
    first = next((place for place, (_, stop) in enumerate(offsets) if stop > start), len(offsets))
    after = next((place for place, (_, stop) in enumerate(offsets) if stop > end), len(offsets))
    return first, after
