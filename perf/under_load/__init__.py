"""Measurements of a server under load: what its clients see."""
