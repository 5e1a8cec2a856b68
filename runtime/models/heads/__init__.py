"""What is made of token vectors: one module a kind of head, each from its spec."""
