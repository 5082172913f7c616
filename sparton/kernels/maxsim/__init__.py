"""MaxSim, the score of late interaction, without materialising the similarities of tokens."""

from sparton.kernels.maxsim.function import maxsim, maxsim_pairs, maxsim_varlen
from sparton.kernels.maxsim.reference import maxsim_reference

__all__ = ["maxsim", "maxsim_pairs", "maxsim_reference", "maxsim_varlen"]
