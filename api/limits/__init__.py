"""Limits of the HTTP side: bodies, connections, frames and deadlines, and what is held against them now."""
