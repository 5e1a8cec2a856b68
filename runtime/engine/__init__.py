"""The engine: it loads models, builds its stages and takes requests."""
