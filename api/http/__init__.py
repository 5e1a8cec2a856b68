"""Connections: listeners, transports, HTTP/1.1 on both paths, and the server that runs them."""
