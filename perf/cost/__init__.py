"""Measurements of the cost of single parts: time, memory and cores."""
