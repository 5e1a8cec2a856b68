"""Settings of a model folder as values, and JSON files with checked types."""
