"""Heads on token vectors and image features: one module for each kind."""
