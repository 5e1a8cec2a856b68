"""Programs for the servers that are frameworks, one each.

Each is a script for the Python of its framework's environment, and imports nothing of ours. All read `--port` and
three environment variables: PEER_MODEL (folder), PEER_DTYPE (of the weights) and PEER_THREADS (of one forward). They
encode with sentence-transformers, which sorts texts by length and pads them 32 at a time.
"""
