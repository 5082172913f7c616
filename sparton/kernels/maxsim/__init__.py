"""Late interaction: the sum over query tokens of the best document token's similarity."""

from sparton.kernels.maxsim.function import maxsim, maxsim_pairs, maxsim_varlen
from sparton.kernels.maxsim.hidden_function import maxsim_from_hidden
from sparton.kernels.maxsim.reference import maxsim_reference

__all__ = ["maxsim", "maxsim_from_hidden", "maxsim_pairs", "maxsim_reference", "maxsim_varlen"]
