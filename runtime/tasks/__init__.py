"""The tasks: how each kind of request becomes inputs of a model, and how rows become its result. Pure functions."""

if __name__ != "staged_pool.runtime.tasks":
    raise ImportError("import this package as staged_pool.runtime.tasks")
