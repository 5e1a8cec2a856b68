"""Measurements of the server and the library: run `python -m perf --help` from the root of the repository.

Nothing here is installed. Each command starts what it measures, ends it again, prints a table and writes
`perf/results/<command>.json` with the facts of the machine. Whatever must not share an interpreter with the thing
that is measured (clients, probes, the bare model) runs in a process of its own.
"""
