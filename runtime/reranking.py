"""The user's settings for a reranker that is a language model: its template and its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from staged_pool.stages.errors import ConfigError

_FIELD: Final = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class RerankerPrompt:
    """The settings `score_template` and `score_tokens`, checked and parsed."""

    template: str | None
    """Template with the fields `{query}`, `{document}` and, optionally, `{instruction}`."""
    tokens: tuple[str, ...]
    """The token of the answer yes, and optionally that of no. Empty: not set."""

    @classmethod
    def of(cls, template: str | None, tokens: str | None) -> RerankerPrompt:
        """Check both settings.

        Raises:
            ConfigError: The template lacks a field or has it twice; or the tokens are not one or two.
        """
        for name, value in (("score_template", template), ("score_tokens", tokens)):
            if not isinstance(value, str | None):
                raise ConfigError(f"{name}={value!r}: must be a text")
        for name in ("query", "document") if template is not None else ():
            count = _FIELD.findall(template or "").count(name)
            if count != 1:
                raise ConfigError(f"score_template={template!r}: must have one field {{{name}}}, has {count}")
        if tokens is None:
            return cls(template, ())
        names = tuple(name.strip() for name in tokens.split(","))
        if not 1 <= len(names) <= 2 or not all(names) or len(set(names)) != len(names):
            raise ConfigError(
                f"score_tokens={tokens!r}: must be the token that means yes, or that token, a comma, and the one that "
                "means no"
            )
        return cls(template, names)

    @property
    def score(self) -> str:
        """The score in words, for the log."""
        true, *false = self.tokens
        return f"the softmax of the logits of {true} and {false[0]}" if false else f"the logit of {true}"
