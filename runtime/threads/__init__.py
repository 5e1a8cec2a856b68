"""Threads: workers, the device's thread, and turns at the cores."""
