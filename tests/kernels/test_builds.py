"""That kernels compile for GPUs that there need not be here, and fit into their memories.

Slow: a minute or two for each capability. What is compiled once is kept in Triton's cache.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# KiB of shared memory that a block may have, by compute capability: A100; A10 and RTX 30; L4, L40S
# and RTX 40; H100 and H200; B200; RTX 50.
SHARED_MEMORY = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
TENSOR_MEMORY = 512  # columns, where there is any
KERNELS = {
    "_segment_max_kernel",
    "_maxsim_streaming_fwd_kernel",
    "_maxsim_streaming_dqueries_kernel",
    "_maxsim_streaming_ddocuments_kernel",
    "_maxsim_residual_fwd_kernel",
    "_maxsim_residual_bwd_kernel",
    "_maxsim_residual_pairs_kernel",
    "_varlen_attention_fwd_kernel",
    "_varlen_attention_dquery_kernel",
    "_varlen_attention_dkey_kernel",
    "_verify_lengths_kernel",
    "_logit_grads_kernel",
    "_hybrid_head_bwd_kernel",
    "_post_norm_backward_kernel",
    "_gelu_backward_kernel",
    "_copy_entries_kernel",
    "_keys_kernel",
    "_score_kernel",
    "_candidates_kernel",
    "gradients_kernel",
    "dhidden_kernel",
    "dweight_kernel",
    "_search_hidden_kernel",
    "_project_backward_kernel",
    "_maxima_kernel",
    "_largest_kernel",
}
ONLY = {"9.0": {"_segment_max_hopper_kernel"}}
FP8 = {"_quantize_kernel", "_rescore_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    room = SHARED_MEMORY[capability]
    words = (sys.executable, "-m", "tests.kernels.builds", capability, str(room))
    root = Path(__file__).parents[2]
    run = subprocess.run(
        words, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    built = dict(json.loads(line) for line in run.stdout.splitlines())
    largest = {case: max(shared for _, shared, _ in kernels) for case, kernels in built.items()}
    assert largest.pop("too large") > room * 1024, "negative control"
    assert {case: size for case, size in largest.items() if size > room * 1024} == {}
    assert max(columns for kernels in built.values() for *_, columns in kernels) <= TENSOR_MEMORY
    names = {name for kernels in built.values() for name, *_ in kernels}
    fp8 = FP8 if capability not in ("8.0", "8.6") else set()
    assert names >= KERNELS | ONLY.get(capability, set()) | fp8
