"""Entities of any label in texts, found by GLiNER models."""
