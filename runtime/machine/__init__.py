"""Cores and memory that the operating system allows this process."""
