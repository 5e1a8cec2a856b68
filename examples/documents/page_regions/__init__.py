"""Regions of document pages, found by their ink, and an embedding of each."""
