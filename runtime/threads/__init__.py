"""Threads of the engine: workers, device threads, and the limit on cores."""
