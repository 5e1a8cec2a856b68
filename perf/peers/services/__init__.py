"""One program for each framework that serves what one writes for it.

Each is run as a script by the Python of its framework's own environment, and imports nothing of ours. They all read
the same three variables of the environment (PEER_MODEL, a folder; PEER_DTYPE, of the weights; PEER_THREADS, of one
forward) and `--port`, and encode with sentence-transformers, which sorts texts by length and pads them 32 at a time.
"""
