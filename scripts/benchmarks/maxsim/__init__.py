"""MaxSim, ours and others'.

Q queries, N documents, K documents per query, L tokens, E embedding, H hidden, T packed tokens.
"""
