"""Limits of the HTTP server on bodies, connections, frames and deadlines, and their current use."""
