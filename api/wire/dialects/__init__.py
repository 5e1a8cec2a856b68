"""Dialects, one module each: pure functions from bytes to `Request`, and from results to bytes."""
