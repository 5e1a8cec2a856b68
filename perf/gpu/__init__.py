"""Checks and timings of one device."""
