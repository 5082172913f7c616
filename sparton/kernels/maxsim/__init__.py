"""Late interaction: the sum over query tokens of the best document token's similarity."""
