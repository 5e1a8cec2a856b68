"""HTTP server, clients, Python API and command line."""

if __name__ != "staged_pool.api":  # imported by its bare folder name, every class would exist twice
    raise ImportError("import staged_pool.api, not api")
