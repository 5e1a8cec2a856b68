"""Devices: replicas, launch order, memory, and choices of kernels."""
