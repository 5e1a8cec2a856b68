"""The engine: configuration, admission, the device thread and the models (no HTTP in here)."""

if (
    __name__ != "staged_pool.runtime"
):  # the folder is on the path by its bare name: two copies of every class would exist
    raise ImportError("import staged_pool.runtime, not runtime")
