"""Worlds of batches: jobs of lines and other callers on one engine, whose answers have little memory."""
