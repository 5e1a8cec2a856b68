"""Errors of libraries that are used in an unforeseen way."""

from __future__ import annotations

from typing import Final

MISUSE_ERRORS: Final = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors that code of transformers raises if it is used in an unforeseen way."""
