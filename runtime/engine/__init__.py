"""The engine: it opens models and devices, builds the pipeline, and takes requests."""
