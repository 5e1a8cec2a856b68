"""Memory: the bytes that requests may hold, and the watch over what the process really takes."""
