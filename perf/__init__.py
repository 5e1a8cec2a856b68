"""Measurements of the server and the library: run `python -m perf --help` from the root of the repository.

Nothing here is installed. Each command starts its servers, stops them, prints a table, and writes
`perf/results/<command>.json` with the facts of the machine. Clients, probes and the bare model run in processes of
their own, so that they do not share an interpreter with the server.
"""
