"""The HTTP face and the command line."""

if __name__ != "staged_pool.api":  # the folder is on the path by its bare name: two copies of every class would exist
    raise ImportError("import staged_pool.api, not api")
