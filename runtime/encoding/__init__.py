"""Calls and results in the shapes of sentence-transformers 6. Pure functions, shared by `Engine` and `Pool`."""

if __name__ != "staged_pool.runtime.encoding":
    raise ImportError("import this package as staged_pool.runtime.encoding")
