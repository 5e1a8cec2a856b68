"""Commands of `python -m perf`, and the options that they share."""
