"""Building blocks of forwards: attention, linear layers, transfers, threads, and checks of their results."""
