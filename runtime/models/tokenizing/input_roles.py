"""Token-level treatment of queries and documents: markers, lengths, query expansion, dropped tokens.

These are pure operations on lists of token ids. The rules are those of late interaction (Khattab and Zaharia, 2020,
ColBERT, section 3.2), as in PyLate and the MultiVectorEncoder of sentence-transformers. The marker counts in the
length, and the expansion follows the last token of a short query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tokenizers import Tokenizer

from staged_pool.runtime.card import Role
from staged_pool.runtime.models.specs.model import ModelFolder, RoleSettings
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, find_special_tokens, read_frame
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.runtime.spans import NO_TEXT, Span
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """Treatment of the token ids of one role: queries or documents."""

    marker: tuple[int, ...] = ()
    """Ids between the tokenizer's leading special tokens, such as [CLS], and the text."""
    max_tokens: int | None = None
    """Longest input in tokens, special tokens and marker included. None: the model's limit."""
    always_cut: bool = False
    """Cut longer inputs even if the request does not ask for it: the model was not trained on them."""
    expand_to: int = 0
    """Length in tokens that shorter inputs are expanded to."""
    expansion: int = 0
    """Id of the token added by the expansion."""
    attend_to_expansion: bool = False
    """Let other tokens attend to the added ones."""
    always_expand: bool = False
    """Expand token ids sent by a caller too, not only texts."""
    expand_before: bool = False
    """Add the expansion before the text."""
    skipped: frozenset[int] = frozenset()
    """Token ids whose vectors are dropped from multi_vector."""
    skipped_first: int | None = None
    """A token id whose vector is dropped from multi_vector if it is the first."""
    looked_up: bool = False
    """See `TokenSequence`."""
    frame: SpecialTokens | None = None
    """Ids around a text instead of the tokenizer's special tokens. None: the special tokens."""

    def limit(self, asked: int | None, model_max_tokens: int) -> tuple[int | None, int]:
        """Compute the length limits of an input, in tokens.

        Args:
            asked: The request's truncation length. None: no truncation.
            model_max_tokens: The model's longest input.

        Returns:
            The truncation length (None: do not cut), and the longest input that is accepted uncut.
        """
        longest = min(self.max_tokens or model_max_tokens, model_max_tokens)
        if asked is None:
            return longest if self.always_cut else None, longest
        return min(asked, longest), longest

    def sequence(
        self,
        ids: TokenIds,
        outputs: Outputs,
        *,
        expand: bool,
        prompt_tokens: int = 0,
        spans: tuple[Span, ...] | None = None,
        chunks: tuple[int, ...] | None = None,
    ) -> TokenSequence:
        """Build the sequence of an input that is already cut and marked.

        Args:
            ids: The input's tokens. Not changed.
            outputs: The requested outputs.
            expand: Expand a short input. False for token ids sent by a caller.
            prompt_tokens: See `TokenSequence`.
            spans: See `TokenSequence`. The expansion gets spans without text.
            chunks: See `TokenSequence`. Only for roles without an expansion. All tokens are kept.
        """
        added = max(self.expand_to - len(ids), 0) if expand or self.always_expand else 0
        if added:
            filling, no_text = [self.expansion] * added, (NO_TEXT,) * added
            ids = [*filling, *ids] if self.expand_before else [*ids, *filling]
            if spans is not None:
                spans = (*no_text, *spans) if self.expand_before else (*spans, *no_text)
        kept = None
        if chunks is None and Output.MULTI_VECTOR in outputs and (self.skipped or ids[0] == self.skipped_first):
            first = int(ids[0] == self.skipped_first)
            kept = tuple(place for place in range(first, len(ids)) if ids[place] not in self.skipped)
        unseen = 0 if self.attend_to_expansion else added
        return TokenSequence(
            ids,
            outputs,
            prompt_tokens=prompt_tokens,
            unseen_tokens=unseen,
            kept=kept,
            spans=spans,
            looked_up=self.looked_up,
            chunks=chunks,
        )


ROLES: Final[tuple[Role, ...]] = ("query", "document")

PLAIN: Final = RoleSpec()
"""Role of models that treat queries and documents alike."""

LOOKED_UP: Final[Mapping[Role, RoleSpec]] = {"query": RoleSpec(frame=SpecialTokens([], []), looked_up=True)}
"""Roles of sparse models that look up the weights of a query's own tokens."""


def padded_roles(padding: int | None, *, side: str, masked: bool, max_tokens: int) -> Mapping[Role, RoleSpec]:
    """Roles of a model trained on texts of one length, which reads their padding too.

    Args:
        padding: Id of the padding token.
        side: The side of the padding.
        masked: True if the attention mask hides the padding.
        max_tokens: The length of padded texts, in tokens.

    Raises:
        ConfigError: There is no padding token, or its mask is not supported.
    """
    if padding is None:
        raise ConfigError("the model needs padded texts, but its tokenizer has no pad_token")
    if side == "left" and masked:
        raise ConfigError(
            "tokenizer_config.json: padding_side='left' with an attention_mask is not supported for a model that needs "
            "padded texts"
        )
    spec = RoleSpec(
        expand_to=max_tokens,
        expansion=padding,
        attend_to_expansion=not masked,
        always_expand=True,
        expand_before=side == "left",
    )
    return dict.fromkeys(ROLES, spec)


def unknown_markers_to_prompts(folder: ModelFolder, tokenizer: Tokenizer) -> ModelFolder:
    """Move markers that are no token of the tokenizer to the beginning of the prompts.

    sentence-transformers does the same: a marker is then tokenized together with the text after it.
    """
    unknown = {
        role: settings.marker
        for role, settings in folder.roles.items()
        if settings.marker.strip() and not _known_marker(settings.marker, tokenizer)
    }
    if not unknown:
        return folder
    roles = {role: replace(each, marker="") if role in unknown else each for role, each in folder.roles.items()}
    prompts = dict(folder.prompts)
    for role, text in unknown.items():
        prompts[role] = text + prompts.get(role, "")
    return replace(folder, roles=roles, prompts=prompts, default_prompt=prompts.get("document", folder.default_prompt))


def resolve_roles(
    settings: Mapping[Role, RoleSettings],
    tokenizer: Tokenizer,
    *,
    special_tokens: Mapping[str, object],
    vocabulary: int,
    max_tokens: int,
) -> Mapping[Role, RoleSpec]:
    """Convert the settings of a folder's roles to token ids.

    Args:
        settings: The settings by role.
        tokenizer: The folder's tokenizer.
        special_tokens: The text of each special token by its name, such as `mask_token`.
        vocabulary: Number of the model's token ids.
        max_tokens: The longest input of the model.

    Raises:
        ConfigError: A token is not in the vocabulary, or a length exceeds the model's limit.
    """
    usual = special_tokens.get("mask_token") or special_tokens.get("eos_token")
    expansion = None if usual is None else str(usual)
    return {
        role: _resolve(role, replace(each, expansion=each.expansion or expansion), tokenizer, vocabulary, max_tokens)
        for role, each in settings.items()
    }


def _resolve(role: Role, settings: RoleSettings, tokenizer: Tokenizer, vocabulary: int, max_tokens: int) -> RoleSpec:
    if settings.expand_to > max_tokens:
        raise ConfigError(f"a {role} is expanded to {settings.expand_to} tokens, but the model takes {max_tokens}")
    expansion = None
    if settings.expand_to:
        expansion = None if settings.expansion is None else tokenizer.token_to_id(settings.expansion)
        if expansion is None:
            name = settings.expansion or "none is named"
            raise ConfigError(f"the token that expands a {role} is not in the vocabulary: {name}")
    spec = RoleSpec(
        marker=_known_marker(settings.marker, tokenizer),
        max_tokens=settings.max_tokens,
        always_cut=settings.always_cut,
        expand_to=settings.expand_to,
        expansion=expansion or 0,
        attend_to_expansion=settings.attend_to_expansion,
        # A word outside the vocabulary is left out: as the unknown token it would drop all unknown words.
        skipped=frozenset(i for i in map(tokenizer.token_to_id, settings.skipped) if i is not None),
        skipped_first=tokenizer.token_to_id(settings.skipped_first) if settings.skipped_first else None,
        frame=_frame(settings, tokenizer),
    )
    if wrong := [i for i in (*spec.marker, spec.expansion) if i >= vocabulary]:
        raise ConfigError(f"token id {wrong[0]} marks or expands a {role}, but the model has only {vocabulary}")
    return spec


def _frame(settings: RoleSettings, tokenizer: Tokenizer) -> SpecialTokens | None:
    if settings.frame is None:
        return None
    frame = read_frame(settings.frame, tokenizer)
    if not settings.keeps_special_tokens:
        return frame
    special = find_special_tokens(tokenizer)
    return SpecialTokens([*special.prefix, *frame.prefix], [*frame.suffix, *special.suffix])


def _known_marker(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Id of a marker that is one token, with or without the space after it; empty if it is not one token."""
    known = (tokenizer.token_to_id(name) for name in (text, *text.split(None, 1)[:1]) if name)
    return tuple(i for i in known if i is not None)[:1]
