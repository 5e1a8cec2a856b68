"""Read how a late interaction model fills short queries up, which folders say in two ways.

The newer one is an object `query_expansion`; the older one is some fields of PyLate, where expansion is the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

PREFIXES: Final = ("query_prefix", "document_prefix")
"""Fields that name the markers of queries and documents."""

_PYLATE_FIELDS: Final = (
    *PREFIXES,
    "query_length",
    "document_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "skiplist_words",
)
"""Any of these in the settings says that PyLate made the folder."""

USUAL_LENGTH: Final = 32
"""Tokens of a query, where nothing says it."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """To what length, and how."""

    length: int
    """Tokens of a query that was filled up."""
    fixed: bool
    """Whether longer queries are cut to the length."""
    attend: bool
    """Whether tokens attend to those that were filled in."""
    token: str | None = None
    """What is filled in. None: not said."""


def read_expansion(transformer: JsonFile, settings: JsonFile) -> Expansion | None:
    """How queries are filled up. None: they are not."""
    for file in (transformer, settings):
        if "query_expansion" in file.content:
            value = file.get("query_expansion", dict, None)
            return None if value is None else _stated_expansion(JsonFile(f"{file.name}: query_expansion", value))
    if not any(name in settings.content for name in _PYLATE_FIELDS):
        return None
    if not settings.get("do_query_expansion", bool, True):
        return None
    attend = settings.get("attend_to_expansion_tokens", bool, None)
    if attend is None:
        attend = settings.get("attend_to_mask_tokens", bool, False)
    return Expansion(settings.positive("query_length") or USUAL_LENGTH, fixed=True, attend=attend)


def _stated_expansion(file: JsonFile) -> Expansion:
    if unknown := sorted(set(file.content) - {"strategy", "attend", "token", "length"}):
        raise ConfigError(f"{file.name}: {unknown[0]} is not known")
    strategy = file.get("strategy", str, None)
    if strategy not in ("fixed", "min"):
        raise ConfigError(f"{file.name}: strategy={strategy!r} must be fixed or min")
    return Expansion(
        file.size("length"),
        fixed=strategy == "fixed",
        attend=file.get("attend", bool, False),
        token=file.get("token", str, None),
    )
