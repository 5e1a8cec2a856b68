"""HTTP/2 on h2, with limits on a client's frames and their state."""
