"""Fuzzing: valid and invalid requests, generated from `/openapi.json`, to a server with tiny, real models.

`parsers.py` feeds our own parsers (`targets.py`) with coverage-guided bytes. `corpus/` has their seeds.

For every request, these must hold:

- The server has no internal error.
- The status and the answer are described in `/openapi.json`.
- A request that the description forbids is rejected.
- Afterwards the server holds no more than before.
"""
