"""Fetching of images and videos by URL, restricted to allowed hosts and one folder."""

if __name__ != "staged_pool.runtime.media":
    raise ImportError("import this package as staged_pool.runtime.media")
