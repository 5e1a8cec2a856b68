"""Pipelines: chains of engines and functions, through which a request goes item by item."""
