"""Requests made from `/openapi.json`, valid and invalid, to a server with tiny, real models.

`parsers.py` gives bytes that coverage guides to our own parsers (`targets.py`); `corpus/` has what they are read from.

What must hold, whatever is asked: no error of the server's own, no status and no answer that is not described, nothing
accepted that the description forbids, and afterwards a server that is as it was.
"""
