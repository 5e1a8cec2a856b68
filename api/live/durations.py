"""Durations in words, for verdicts and for the terminal."""

from __future__ import annotations


def span(seconds: float) -> str:
    """Return a duration with its unit, to two digits."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{float(f'{seconds * 1e3:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):g} s"
