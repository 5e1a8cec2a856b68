"""Turn texts into token ids, in many threads at once.

Truncation and padding are settings of a `tokenizers.Tokenizer`, not arguments of a call: threads that ask
one tokenizer for different lengths silently get each other's. So the tokenizer here is a private copy on which
neither is ever set. It only tokenizes the bare text; cutting and adding special tokens are list operations.

The batch call is used even for one text: it releases the GIL, the single call does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from staged_pool.runtime.model import ModelInput, Role, TokenIds, Tokens, TokenSequence
from staged_pool.runtime.models.roles import PLAIN, RoleSpec
from staged_pool.runtime.requests import MODEL_MAX, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

_PROBES: Final = ("x", "a b c", "Two sentences. Of words?")


class TextTokenizer:
    """The tokenizer of one model. Every method may run in several threads at once.

    Args:
        source: A tokenizer as its model's author set it up; it is copied.
        max_tokens: Longest input that the model takes, special tokens included.
        vocabulary: Token ids run from 0 to one less.
        lower_case: Whether text is lowercased before anything else is done to it.
        roles: How queries and documents are read, where that differs; an input without a role is a document.

    Raises:
        ConfigError: The special tokens are not a fixed beginning and end, or leave the text no room.
    """

    def __init__(
        self,
        source: Tokenizer,
        *,
        max_tokens: int,
        vocabulary: int,
        lower_case: bool = False,
        roles: Mapping[Role, RoleSpec] | None = None,
    ) -> None:
        self._tokenizer = _private_copy(source, lower_case=lower_case)
        self._prefix, self._suffix = _special_tokens(self._tokenizer)
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._roles = roles or {}
        if len(self._prefix) + len(self._suffix) >= max_tokens:
            raise ConfigError(f"the model takes {max_tokens} tokens, which its special tokens alone fill")

    def preprocess(self, inputs: Sequence[ModelInput]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """Turn each input into token ids, or say what is wrong with it. Order and number are kept.

        An error carries no index: only the caller knows where in its request these inputs stand.
        """
        prepared: list[Prepared[TokenSequence] | InvalidInput] = []
        texts = [_text(given) for given in inputs]
        for given, text, bare in zip(inputs, texts, self._bare_ids(inputs, texts), strict=True):
            try:
                sequence = self._finish(given, text, bare)
            except InvalidInput as error:
                prepared.append(error)
            else:
                prepared.append(Prepared(sequence, cost=len(sequence.ids), batch_key=given.outputs))
        return prepared

    def tokenize(self, text: str, *, add_special_tokens: bool) -> Tokens:
        """Tokenize one text without prompt and without cutting it.

        Raises:
            InvalidInput: The text is not valid Unicode.
        """
        if not _is_valid_text(text):
            raise _not_unicode()
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return Tokens(encoding.ids, encoding.tokens)

    def _bare_ids(self, inputs: Sequence[ModelInput], texts: Sequence[TextInput]) -> list[TokenIds | None]:
        """The ids of each input, uncut and without special tokens; None for a text that is not valid Unicode."""
        ids = [list(text.source) if isinstance(text.source, tuple) else None for text in texts]
        places = [place for place, text in enumerate(texts) if _is_valid_text(text.source)]
        prompted = [f"{inputs[place].prompt}{texts[place].source}" for place in places]
        encodings = self._tokenizer.encode_batch_fast(prompted, add_special_tokens=False)
        for place, encoding in zip(places, encodings, strict=True):
            ids[place] = encoding.ids
        return ids

    def _finish(self, wanted: ModelInput, given: TextInput, bare: TokenIds | None) -> TokenSequence:
        """Cut, add special tokens and check: what the model is to see."""
        role = self._roles.get(wanted.role or "document", PLAIN)
        limit, longest = role.limit(token_limit(given.max_tokens, self._max_tokens), self._max_tokens)
        if bare is None:
            raise _not_unicode()
        adds = isinstance(given.source, str) and given.add_special_tokens
        prefix, suffix = ([*self._prefix, *role.marker], self._suffix) if adds else ([], [])
        tokens = len(prefix) + len(bare) + len(suffix)
        if limit is not None and tokens > limit:
            room = max(limit - len(prefix) - len(suffix), 0)
            bare = bare[:room] if given.truncate_side == "right" else bare[len(bare) - room :]
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = [*prefix, *bare, *suffix][:limit]
        elif tokens > longest:
            raise InvalidInput(
                f"This model's maximum context length is {longest} tokens. However, your input "
                f"contains {tokens} tokens. Please reduce the length of the input prompt, "
                "or set truncate_prompt_tokens.",
                param="input",
            )
        else:
            ids = [*prefix, *bare, *suffix]
        if not ids:
            raise InvalidInput("The input has no tokens; it must have at least one.", param="input")
        # Also for texts: a tokenizer may know added tokens that the weights have no row for.
        if (lowest := min(ids)) < 0 or max(ids) >= self._vocabulary:
            wrong = lowest if lowest < 0 else max(ids)
            raise InvalidInput(f"Token id {wrong} is out of vocabulary", param="input")
        return role.sequence(ids, wanted.outputs, expand=adds)


def token_limit(max_tokens: int | None, model_max_tokens: int) -> int | None:
    """How many tokens a `TextInput.max_tokens` allows on a model that takes so many. None: never cut.

    Raises:
        InvalidInput: More than the model takes, or less than `MODEL_MAX`.
    """
    if max_tokens is None:
        return None
    if max_tokens == MODEL_MAX:
        return model_max_tokens
    if max_tokens > model_max_tokens:
        raise InvalidInput(
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )
    if max_tokens < 0:
        raise InvalidInput(f"truncate_prompt_tokens must be at least {MODEL_MAX}.", param="truncate_prompt_tokens")
    return max_tokens


def _private_copy(source: Tokenizer, *, lower_case: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(source.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if lower_case:
        given = tokenizer.normalizer
        tokenizer.normalizer = NormalizerSequence([Lowercase(), *([given] if given is not None else [])])
    return tokenizer


def _special_tokens(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds]:
    """The ids that the tokenizer puts before and after any text.

    Found by comparing with and without, and checked on a few texts: a tokenizer that does anything else
    with special tokens than to put them around the text would be imitated wrongly.
    """
    bare = [e.ids for e in tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=False)]
    full = [e.ids for e in tokenizer.encode_batch_fast(list(_PROBES), add_special_tokens=True)]
    added = len(full[0]) - len(bare[0])
    for before in range(added + 1):
        prefix, suffix = full[0][:before], full[0][before + len(bare[0]) :]
        if all(f == [*prefix, *b, *suffix] for f, b in zip(full, bare, strict=True)):
            return prefix, suffix
    raise ConfigError("the tokenizer does more with special tokens than to put them around the text")


def _text(given: ModelInput) -> TextInput:
    if not isinstance(given.source, TextInput):
        raise TypeError("a pair of texts")
    return given.source


def _is_valid_text(source: object) -> bool:
    """Whether this is a text that UTF-8 can express; a lone half of a surrogate pair is not."""
    if not isinstance(source, str):
        return False
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_unicode() -> InvalidInput:
    return InvalidInput("The input is not valid Unicode: it holds half of a surrogate pair.", param="input")
