"""The engine: settings, admission, device threads and models. Imports no HTTP server."""

if __name__ != "staged_pool.runtime":  # imported by the bare name of its folder, every class would exist twice
    raise ImportError("import staged_pool.runtime, not runtime")
