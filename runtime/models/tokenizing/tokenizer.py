"""Conversion of a model's inputs to token ids, and of token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from staged_pool.runtime.model import ModelInput, Role, TokenSequence
from staged_pool.runtime.models.specs.model import PairForm, PairPieces
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate
from staged_pool.runtime.models.tokenizing.input_roles import RoleSpec
from staged_pool.runtime.models.tokenizing.limits import InputLimits, check_characters, check_text
from staged_pool.runtime.models.tokenizing.pair_templates import TemplateReader
from staged_pool.runtime.models.tokenizing.pairs import PairReader
from staged_pool.runtime.models.tokenizing.piecewise_pairs import PieceReader
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.special_tokens import (
    SpecialTokens,
    find_pair_special_tokens,
    find_special_tokens,
)
from staged_pool.runtime.models.tokenizing.text_cleanup import clean_up_spaces
from staged_pool.runtime.models.tokenizing.texts import TextReader
from staged_pool.runtime.requests import Chat, PairInput, Side, TextInput
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared


class TextTokenizer:
    """The tokenizer of one model. Every method may run in several threads at once.

    Args:
        source: The folder's tokenizer; it is copied.
        max_tokens: Longest input of the model in tokens, special tokens included.
        vocabulary: Number of token ids: they run from 0 to `vocabulary` - 1.
        lower_case: Lowercase texts before tokenization.
        pools_prompt: True if pooling includes the tokens of a prompt. False marks them in each sequence.
        gives_types: True if the model takes token types, which distinguish the texts of a pair.
        chat_template: Jinja template that renders a conversation as one text. None: the model has none.
        special_tokens: The text of each special token by its name, for chat templates.
        pair_template: Prompt of a pair. None: two texts with the tokenizer's special tokens.
        roles: Treatment of queries and documents. A text without a role is a document.
        takes_parts: True if the chat template takes messages with texts and images.
        reads_one: The model reads one text or one image at a time. Without a chat template, a conversation of texts is
            then read as the plain text of its messages.
        truncation_side: The end that is cut off unless the request names one.
        cleans_up: Remove spaces before punctuation from decoded text.

    Raises:
        ConfigError: The special tokens are not a fixed prefix and suffix, or leave no room for text; or the pair
            template does not fit pairs.
    """

    shared: SharedTokenizer
    limits: InputLimits
    special: SpecialTokens
    """The special tokens around a text."""

    def __init__(
        self,
        source: Tokenizer,
        *,
        max_tokens: int,
        vocabulary: int,
        lower_case: bool = False,
        pools_prompt: bool = True,
        gives_types: bool = True,
        chat_template: str | None = None,
        special_tokens: Mapping[str, object] | None = None,
        pair_template: PairForm | None = None,
        roles: Mapping[Role, RoleSpec] | None = None,
        takes_parts: bool = False,
        reads_one: bool = False,
        truncation_side: Side = "right",
        cleans_up: bool = False,
    ) -> None:
        self.shared = SharedTokenizer(source, lower_case=lower_case)
        self.limits = InputLimits(max_tokens, vocabulary, truncation_side)
        self._cleans_up = cleans_up
        self.special = find_special_tokens(self.shared.tokenizer)
        if len(self.special) >= max_tokens:
            raise ConfigError(f"the model takes {max_tokens} tokens, which its special tokens fill already")
        chat = None if chat_template is None else ChatTemplate(chat_template, special_tokens or {}, takes_parts)
        self._texts = TextReader(
            self.shared,
            self.special,
            self.limits,
            pools_prompt=pools_prompt,
            chat_template=chat,
            plain_chats=reads_one and chat is None,
            roles=roles or {},
        )
        self._pairs: PairReader | TemplateReader | PieceReader | ConfigError
        if isinstance(pair_template, PairPieces):
            first = _first_token(self.shared, special_tokens or {})
            self._pairs = PieceReader(self.shared, self.limits, pieces=pair_template, first_token=first)
            return
        if pair_template is not None:
            self._pairs = TemplateReader(self.shared, self.special, self.limits, template=pair_template, chat=chat)
            return
        try:
            pair = find_pair_special_tokens(self.shared.tokenizer, gives_types=gives_types)
        except ConfigError as error:
            self._pairs = error
        else:
            self._pairs = PairReader(self.shared, pair, self.limits)

    def require_pairs(self) -> None:
        """Check that the tokenizer supports pairs, for a model that needs them.

        Raises:
            ConfigError: The tokenizer's treatment of pairs is not supported.
        """
        if isinstance(self._pairs, ConfigError):
            raise self._pairs

    def preprocess(
        self, inputs: Sequence[ModelInput]
    ) -> list[Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput]:
        """Tokenize each input, or return its error. The results have the order of the inputs.

        A too long input that may be split gives a tuple of sequences. An error has no index: only the caller knows the
        places of these inputs in its request.
        """
        texts = [(given, given.source) for given in inputs if isinstance(given.source, TextInput)]
        if len(texts) == len(inputs):
            return self._texts.read(texts)
        pairs = [(given, given.source) for given in inputs if isinstance(given.source, PairInput)]
        of_texts, of_pairs = iter(self._texts.read(texts)), iter(self._read_pairs(pairs))
        return [next(of_pairs if isinstance(given.source, PairInput) else of_texts) for given in inputs]

    def write_chat(self, chat: Chat, prompt: str = "") -> str:
        """See `TextReader.write_chat`."""
        return self._texts.write_chat(chat, prompt)

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
        return clean_up_spaces(text) if self._cleans_up else text

    def _read_pairs(
        self, pairs: Sequence[tuple[ModelInput, PairInput]]
    ) -> Sequence[Prepared[TokenSequence] | InvalidInput]:
        if isinstance(self._pairs, ConfigError):
            return [InvalidInput(f"The model takes no pairs: {self._pairs}.", param="input") for _ in pairs]
        return self._pairs.read(pairs)


def _first_token(shared: SharedTokenizer, special_tokens: Mapping[str, object]) -> int | None:
    """Id of `bos_token`. None: there is none, or it is the padding token too."""
    begin, padding = special_tokens.get("bos_token"), special_tokens.get("pad_token")
    return None if begin is None or begin == padding else shared.tokenizer.token_to_id(str(begin))
