"""That kernels compile for Hopper and fit into its shared memory, seen on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024  # of a block, at most


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_fit():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = (sys.executable, "-m", "tests.kernels.hopper_builds")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        words, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    built = dict(json.loads(line) for line in run.stdout.splitlines())
    sizes = {case: [shared for _, shared in kernels] for case, kernels in built.items()}
    assert max(sizes.pop("too large")) > SHARED_MEMORY
    assert {case: max(found) for case, found in sizes.items() if max(found) > SHARED_MEMORY} == {}
    names = {name for kernels in built.values() for name, _ in kernels}
    assert names > {
        "_segment_max_hopper_kernel",
        "_segment_max_kernel",
        "_maxsim_streaming_fwd_kernel",
        "_varlen_attention_fwd_kernel",
        "_verify_lengths_kernel",
        "gradients_kernel",
        "dhidden_kernel",
        "_search_hidden_kernel",
        "_project_backward_kernel",
    }
