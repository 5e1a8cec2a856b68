"""Readers of model folders' settings, one module per kind of model. No weights are loaded here."""
