"""Worlds of a pool of worker processes, in virtual time."""
