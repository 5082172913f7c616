"""Without a GPU, Triton kernels run in its interpreter. It must be chosen before Triton is
imported, hence here and not in the folder of the kernel tests."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
