"""Models: reading model folders, tokenizing, and forwards."""
