"""One module a dialect: bytes to Request, Result to bytes. Pure functions."""
