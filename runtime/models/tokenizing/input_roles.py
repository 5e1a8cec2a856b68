"""How a model tells queries from documents: markers, lengths, a query's expansion, and tokens that are left out.

Pure operations on lists of token ids. The rules are those of late interaction (Khattab and Zaharia, 2020, ColBERT,
section 3.2), as PyLate and the MultiVectorEncoder of sentence-transformers have them: the marker counts in the length,
and a query that is shorter than the expansion's length is filled up behind its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tokenizers import Tokenizer

from staged_pool.runtime.model import Role, Span, TokenIds, TokenSequence
from staged_pool.runtime.models.specs.model import ModelFolder, RoleSettings
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, read_frame
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What is done to the token ids of an input because it is a query, or because it is a document."""

    marker: tuple[int, ...] = ()
    """Stands between the tokens that the tokenizer puts first, such as [CLS], and the text."""
    max_tokens: int | None = None
    """Longest input of this role, special tokens and marker included. None: what the model takes."""
    always_cut: bool = False
    """Whether longer inputs are cut even where the request asks for nothing to be cut: the model knows no others."""
    expand_to: int = 0
    """Fill shorter inputs up to so many tokens."""
    expansion: int = 0
    """The token id that they are filled up with."""
    attend_to_expansion: bool = False
    """Whether tokens attend to those that were filled in."""
    always_expand: bool = False
    """Whether this is done to token ids that a caller sends, too."""
    expand_before: bool = False
    """Whether those that are filled in stand before the text."""
    skipped: frozenset[int] = frozenset()
    """Token ids whose vectors are left out of multi_vector."""
    skipped_first: int | None = None
    """A token id whose vector is left out of multi_vector where it stands first."""
    frame: SpecialTokens | None = None
    """What goes around a text instead of the tokenizer's special tokens. None: those do."""

    def limit(self, asked: int | None, model_max_tokens: int) -> tuple[int | None, int]:
        """How long an input may be.

        Args:
            asked: What the request cuts at. None: it does not.
            model_max_tokens: The longest input of the model.

        Returns:
            Where to cut (None: never), and the longest input that is taken uncut.
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
    ) -> TokenSequence:
        """What the device is to read of an input that is cut and marked already.

        Args:
            ids: The input's tokens. Not changed.
            outputs: What is wanted of it.
            expand: Whether it is filled up; not where the caller decides which tokens there are.
            prompt_tokens: As in `TokenSequence`.
            spans: As in `TokenSequence`.
        """
        added = max(self.expand_to - len(ids), 0) if expand or self.always_expand else 0
        if added:
            filling = [self.expansion] * added
            ids = [*filling, *ids] if self.expand_before else [*ids, *filling]
        kept = None
        if Output.MULTI_VECTOR in outputs and (self.skipped or ids[0] == self.skipped_first):
            first = int(ids[0] == self.skipped_first)
            kept = tuple(place for place in range(first, len(ids)) if ids[place] not in self.skipped)
        unseen = 0 if self.attend_to_expansion else added
        return TokenSequence(ids, outputs, prompt_tokens=prompt_tokens, unseen_tokens=unseen, kept=kept, spans=spans)


ROLES: Final[tuple[Role, ...]] = ("query", "document")

PLAIN: Final = RoleSpec()
"""For models that read queries as they read documents."""


def filling_roles(padding: int | None, *, side: str, masked: bool, max_tokens: int) -> Mapping[Role, RoleSpec]:
    """For a model that was trained on texts that are all equally long: the padding is a part of what it reads.

    Args:
        padding: The token that fills texts up.
        side: Where it goes.
        masked: Whether no token attends to it.
        max_tokens: What texts are filled up to.

    Raises:
        ConfigError: There is no such token, or it is hidden in a way that is not done here.
    """
    if padding is None:
        raise ConfigError("the model reads texts that are filled up, and its tokenizer has no pad_token")
    if side == "left" and masked:
        raise ConfigError(
            "tokenizer_config.json: padding_side='left' with an attention_mask is not supported for a model whose "
            "texts are filled up"
        )
    spec = RoleSpec(
        expand_to=max_tokens,
        expansion=padding,
        attend_to_expansion=not masked,
        always_expand=True,
        expand_before=side == "left",
    )
    return dict.fromkeys(ROLES, spec)


def with_written_markers(folder: ModelFolder, tokenizer: Tokenizer) -> ModelFolder:
    """The folder with markers that its tokenizer has no token for at the beginning of its prompts instead.

    sentence-transformers reads such folders so; the text of a marker and what follows it are then tokenized together.
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
    """What a folder says of its roles, in the token ids of its tokenizer.

    Args:
        settings: By role.
        tokenizer: The folder's own.
        special_tokens: The text of each special token by its name, such as `mask_token`.
        vocabulary: Token ids run from 0 to one less.
        max_tokens: The longest input of the model.

    Raises:
        ConfigError: A token is not in the vocabulary, or a length is beyond what the model takes.
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
        # A word that the vocabulary lacks is not looked up as the unknown token: it would take all of those with it.
        skipped=frozenset(i for i in map(tokenizer.token_to_id, settings.skipped) if i is not None),
        skipped_first=tokenizer.token_to_id(settings.skipped_first) if settings.skipped_first else None,
        frame=None if settings.frame is None else read_frame(settings.frame, tokenizer),
    )
    if wrong := [i for i in (*spec.marker, spec.expansion) if i >= vocabulary]:
        raise ConfigError(f"token id {wrong[0]} marks or expands a {role}, but the model has only {vocabulary}")
    return spec


def _known_marker(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The one token that a marker is, with the blank behind it or without; nothing where it is none."""
    known = (tokenizer.token_to_id(name) for name in (text, *text.split(None, 1)[:1]) if name)
    return tuple(i for i in known if i is not None)[:1]
