"""HTTP/2, with bounds on frames and on the state that a client can make."""
