"""Matrices in integers of 8 bits (int8), for processors that multiply those faster."""
