"""Towers: each turns prepared inputs of one kind into rows."""
