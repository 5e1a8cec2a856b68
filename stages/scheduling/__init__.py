"""What runs next, and why: order, batch size, batch delay, coalescing. Pure: no await, no clock, no torch."""
