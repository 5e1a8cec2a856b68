"""The four stages and the values that travel between them (stdlib, anyio and structlog only)."""

if (
    __name__ != "staged_pool.stages"
):  # the folder is on the path by its bare name: two copies of every class would exist
    raise ImportError("import staged_pool.stages, not stages")
