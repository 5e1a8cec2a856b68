"""Live view: rates of a running server, the bottleneck in one sentence, and the events that carry both."""
