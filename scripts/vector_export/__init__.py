"""Export of vectors for search engines; ``scripts/export_vectors.py`` is the program.

N texts, V terms, T token vectors in all, E their width.
"""
