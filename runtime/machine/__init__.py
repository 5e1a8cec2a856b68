"""What the operating system gives this process: cores and memory."""
