"""Connections of HTTP/1.1 in virtual time: the real door, application and engine behind a transport that is made up."""
