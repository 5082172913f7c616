"""Late interaction: the sum over query tokens of the best document token's similarity."""

from sparton.kernels.maxsim.function import maxsim, maxsim_pairs, maxsim_varlen
from sparton.kernels.maxsim.reference import maxsim_reference

__all__ = ["maxsim", "maxsim_pairs", "maxsim_reference", "maxsim_varlen"]
