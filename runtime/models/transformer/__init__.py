"""Transformers on packed batches of token sequences."""
