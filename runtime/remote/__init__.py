"""Stages across processes: fronts prepare requests, and one engine process computes for all of them."""
