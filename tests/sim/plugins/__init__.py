"""Worlds of a plugin whose hooks end in every way that user code can."""
