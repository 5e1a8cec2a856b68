"""Servers of tests.

- `process.ServerProcess`: a server in a process of its own, as a user starts it. It is for flags, signals, exit codes
  and memory.
"""
