"""Worlds of a server of several processes: the real supervisor, and fronts and engine processes that die and freeze."""
