"""Command lines of the measurements, one function for each command."""
