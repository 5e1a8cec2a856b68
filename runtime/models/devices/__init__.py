"""Devices: order of forwards, streams, graphs, and choices of kernels."""
