"""Scheduling: order, batch size, batch delay and coalescing. Pure: no await, no torch."""
