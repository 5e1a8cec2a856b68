"""Caching: fingerprints of inputs, and the rows cached under them."""
