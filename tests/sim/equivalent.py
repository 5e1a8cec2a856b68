"""Mutants that change nothing that a caller could notice, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}

NO_MUTANTS: dict[str, str] = {}
"""Those that die of an error of their own: what was swapped cannot be swapped."""
