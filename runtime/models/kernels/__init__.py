"""Building blocks of forwards: attention, products, transfers, and checks of each against transformers."""
