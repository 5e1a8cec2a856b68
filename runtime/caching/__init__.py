"""Fingerprints of inputs, and rows that are kept under them."""
