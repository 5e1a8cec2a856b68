"""Connections of HTTP/1.1 in virtual time: the real server, application and engine behind a simulated transport."""
