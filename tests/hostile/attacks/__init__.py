"""One module for each group of attacks."""
