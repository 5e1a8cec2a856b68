"""Conversion of a model's inputs to token ids, and of token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate
from staged_pool.runtime.models.tokenizing.conversations import ConversationWriter
from staged_pool.runtime.models.tokenizing.limits import InputLimits, check_characters, check_text
from staged_pool.runtime.models.tokenizing.pair_templates import DraftedPair, TemplateReader
from staged_pool.runtime.models.tokenizing.pairs import PairReader
from staged_pool.runtime.models.tokenizing.piecewise_pairs import PieceReader
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.special_tokens import (
    SpecialTokens,
    find_pair_special_tokens,
    find_special_tokens,
)
from staged_pool.runtime.models.tokenizing.text_cleanup import clean_up_spaces
from staged_pool.runtime.models.tokenizing.text_settings import SpecialTexts, TextSettings
from staged_pool.runtime.models.tokenizing.texts import TextReader
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Chat, ImagePair, PairInput, TextInput
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared


class TextTokenizer:
    """The tokenizer of one model. Every method may run in several threads at once.

    Args:
        shared: The tokenizer's vocabulary and steps.
        settings: All other settings.

    Raises:
        ConfigError: The special tokens are not a fixed prefix and suffix, or leave no room for text; or the pair
            template does not fit pairs; or pairs are needed and not supported.
    """

    shared: SharedTokenizer
    settings: TextSettings
    limits: InputLimits
    special: SpecialTokens
    """The special tokens around a text."""

    def __init__(self, shared: SharedTokenizer, settings: TextSettings) -> None:
        self.shared, self.settings = shared, settings
        self.limits = InputLimits(settings.max_tokens, settings.vocabulary, settings.truncation_side)
        self.special = find_special_tokens(shared.tokenizer)
        if len(self.special) >= settings.max_tokens:
            raise ConfigError(f"the model takes {settings.max_tokens} tokens, which its special tokens fill already")
        template, special_tokens = settings.chat_template, settings.special_tokens
        chat = None if template is None else ChatTemplate(template, special_tokens, settings.takes_parts)
        form = settings.conversation
        self._texts = TextReader(
            shared,
            self.special,
            self.limits,
            pools_prompt=settings.pools_prompt,
            chat_template=chat,
            conversations=None if form is None else ConversationWriter(form, chat),
            plain_chats=settings.reads_one and chat is None,
            roles=settings.roles,
            empty_id=settings.empty_id,
            step_id=settings.step_id,
        )
        self._pairs = self._pair_reader(chat)
        if settings.needs_pairs and isinstance(self._pairs, ConfigError):
            raise self._pairs

    def _pair_reader(self, chat: ChatTemplate | None) -> PairReader | TemplateReader | PieceReader | ConfigError:
        """Build the reader of pairs, or return the reason why there is none."""
        settings = self.settings
        if settings.pair_pieces is not None:
            first = _first_token(self.shared, settings.special_tokens)
            return PieceReader(self.shared, self.limits, pieces=settings.pair_pieces, first_token=first)
        if settings.pair_template is not None:
            return TemplateReader(self.shared, self.special, self.limits, template=settings.pair_template, chat=chat)
        try:
            pair = find_pair_special_tokens(self.shared.tokenizer, gives_types=settings.gives_types)
        except ConfigError as error:
            return error
        return PairReader(self.shared, pair, self.limits)

    def preprocess(
        self, inputs: Sequence[ModelInput]
    ) -> list[Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput]:
        """Tokenize each input, or return its error. The results have the order of the inputs.

        A too long input that may be split gives a tuple of sequences. An error has no index: only the caller knows the
        places of these inputs in its request.
        """
        if any(given.adapter is not None for given in inputs):
            plain = self.preprocess([replace(given, adapter=None) for given in inputs])
            return [_adapted(outcome, given.adapter) for outcome, given in zip(plain, inputs, strict=True)]
        texts = [(given, given.source) for given in inputs if isinstance(given.source, TextInput)]
        if len(texts) == len(inputs):
            return self._texts.read(texts)
        pairs = [(given, given.source) for given in inputs if isinstance(given.source, PairInput)]
        of_texts, of_pairs = iter(self._texts.read(texts)), iter(self._read_pairs(pairs))
        return [next(of_pairs if isinstance(given.source, PairInput) else of_texts) for given in inputs]

    def warm_up(self) -> None:
        """Write a conversation, if the model has a template for it: the first one imports transformers."""
        if self.settings.chat_template is not None:
            with suppress(InvalidInput):  # the template takes other messages
                self.write_chat(Chat(({"role": "user", "content": "warm up"},)))

    def write_chat(self, chat: Chat, prompt: str = "") -> str:
        """See `TextReader.write_chat`."""
        return self._texts.write_chat(chat, prompt)

    def draft_pair(self, given: ModelInput, pair: ImagePair, rewrite: Callable[[str], str] = str) -> DraftedPair:
        """Tokenize a pair with images, in which one token stands for each image; see `TemplateReader.draft`.

        Raises:
            InvalidInput: The model does not accept it.
        """
        if not isinstance(self._pairs, TemplateReader):
            raise InvalidInput("The model takes no pairs with images.", param="input")
        return self._pairs.draft(given, pair, rewrite)

    def place(self, prompt: str) -> SpecialTokens:
        """Return the tokens around the text of a conversation with one message, for `TextSettings.conversation`.

        Those before the text may be merged with its beginning.
        """
        return self._texts.place(prompt)

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        """Tokenize one text or conversation, without prompt and truncation.

        Raises:
            InvalidInput: The text is not valid Unicode or too long, or the model has no chat template.
        """
        text = source if isinstance(source, str) else self._texts.write_chat(source)
        check_text(text)
        check_characters(text)
        encoding = self.shared.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        spans = [
            None if special else span
            for span, special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        ]
        return Tokens(encoding.ids, encoding.tokens, spans)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode token ids to text.

        Raises:
            InvalidInput: An id is outside the vocabulary.
        """
        if not ids:
            return ""
        self.limits.check_ids(ids)
        text: str
        (text,) = self.shared.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self.settings.cleans_up else text

    def _read_pairs(
        self, pairs: Sequence[tuple[ModelInput, PairInput]]
    ) -> Sequence[Prepared[TokenSequence] | InvalidInput]:
        if isinstance(self._pairs, ConfigError):
            return [InvalidInput(f"The model takes no pairs: {self._pairs}.", param="input") for _ in pairs]
        return self._pairs.read(pairs)


def _adapted(
    outcome: Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput, adapter: str | None
) -> Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput:
    """Let an adapter read a sequence. Only sequences of one adapter share a batch."""
    if isinstance(outcome, tuple):
        return tuple(_for_adapter(part, adapter) for part in outcome)
    return _for_adapter(outcome, adapter) if isinstance(outcome, Prepared) else outcome


def _for_adapter(made: Prepared[TokenSequence], adapter: str | None) -> Prepared[TokenSequence]:
    if adapter is None:
        return made
    return Prepared(replace(made.payload, adapter=adapter), made.tokens, (made.batch_key, adapter))


def _first_token(shared: SharedTokenizer, special_tokens: SpecialTexts) -> int | None:
    """Id of `bos_token`. None: there is none, or it is the padding token too."""
    begin, padding = special_tokens.get("bos_token"), special_tokens.get("pad_token")
    return None if begin is None or begin == padding else shared.tokenizer.token_to_id(str(begin))
