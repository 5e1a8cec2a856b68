"""Worlds of fronts: several of them, the engine process's part, and lines that split, delay and end anywhere."""
