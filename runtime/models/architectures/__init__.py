"""Transformers that the transformers library has no class for; importing `catalogue` makes them known to it."""
