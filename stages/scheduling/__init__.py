"""Scheduling: order, batch size, batch delay, coalescing. Pure: no await, no torch."""
