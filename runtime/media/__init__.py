"""Images that are named by URLs: which may be fetched, and fetching them."""

if __name__ != "staged_pool.runtime.media":
    raise ImportError("import this package as staged_pool.runtime.media")
