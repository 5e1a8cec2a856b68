"""Tasks: pure functions that plan requests and make results from rows."""

if __name__ != "staged_pool.runtime.tasks":
    raise ImportError("import this package as staged_pool.runtime.tasks")
