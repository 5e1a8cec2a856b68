"""Query expansion settings of late interaction models.

Newer folders have an object `query_expansion`. Older ones have fields of PyLate, which expands queries by default.
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
"""Settings of PyLate: any of them shows that PyLate wrote the folder."""

DEFAULT_QUERY_TOKENS: Final = 32
"""Default length of an expanded query, in tokens."""

MOST_EXPANDED: Final = 2**16
"""Most tokens of an expanded query: each query is made as long."""


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Padding of short queries with extra tokens, whose vectors count in the score."""

    length: int
    """Length of an expanded query, in tokens."""
    fixed: bool
    """Cut longer queries to `length`."""
    attend: bool
    """Let other tokens attend to the added ones."""
    token: str | None = None
    """The added token. None: not set."""


def read_expansion(transformer: JsonFile, settings: JsonFile) -> QueryExpansion | None:
    """Read the query expansion. None: queries are not expanded."""
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
    return QueryExpansion(
        settings.positive("query_length", MOST_EXPANDED) or DEFAULT_QUERY_TOKENS, fixed=True, attend=attend
    )


def _stated_expansion(file: JsonFile) -> QueryExpansion:
    if unknown := sorted(set(file.content) - {"strategy", "attend", "token", "length"}):
        raise ConfigError(f"{file.name}: {unknown[0]} is not known")
    strategy = file.get("strategy", str, None)
    if strategy not in ("fixed", "min"):
        raise ConfigError(f"{file.name}: strategy={strategy!r} must be fixed or min")
    return QueryExpansion(
        file.size("length", MOST_EXPANDED),
        fixed=strategy == "fixed",
        attend=file.get("attend", bool, False),
        token=file.get("token", str, None),
    )
