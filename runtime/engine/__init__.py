"""The engine: it loads models, builds the pipeline and takes requests."""
