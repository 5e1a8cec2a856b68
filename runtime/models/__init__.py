"""The models: reading their folders, tokenizing, and the forward."""
