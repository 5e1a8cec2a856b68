"""Checkpoints: weights and tokenizers of a model folder, loaded and checked."""
