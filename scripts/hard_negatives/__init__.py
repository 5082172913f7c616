"""Mining of hard negatives; ``scripts/mine_hard_negatives.py`` is the program.

N documents of the collection, E positives outside of it, V terms, K ranks.
"""
