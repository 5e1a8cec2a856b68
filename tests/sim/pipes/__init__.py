"""Worlds of two engines and a pipeline on them, in virtual time."""
