"""The core that the SPLADE head and MaxSim share: a matrix product whose token axis is reduced
sequence by sequence while the product is computed.

N sequences, T packed tokens, D hidden (or embedding), V rows (a vocabulary, or query tokens):

    out[n, v] = f(max over the tokens t of sequence n of tokens[t] . rows[v] + bias[v])

with the token that wins, the gradients that go through it, and the sum in place of the maximum.
forward.py chooses between two kernels, hopper.py and portable.py; backward.py lists the active
entries by destination (ordering.py) and sums.
"""
