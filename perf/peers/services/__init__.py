"""One program for each framework that serves what one writes for it.

Each is run by the Python of its framework's own environment, from this folder, and imports nothing of ours. They all
read the same three variables of the environment (PEER_MODEL, a folder; PEER_DTYPE, of the weights; PEER_THREADS, of one
forward) and `--port`, and encode with sentence-transformers, which sorts a batch by length and pads it 32 at a time.
"""
