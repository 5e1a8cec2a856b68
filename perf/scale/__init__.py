"""A cost model and a queue simulation of many fronts, engine processes and devices."""
