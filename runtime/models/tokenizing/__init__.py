"""Tokenization of texts, pairs and conversations, in many threads at once."""
