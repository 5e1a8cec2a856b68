"""What a model folder says, as values; and JSON files with checked types."""
