"""The search on a GPU: what is rehearsed takes the memory of the step, and what is found fits."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops, l1
from sparton.models.backbones import random_bert
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.training.distributed import World
from sparton.training.micro_batch import MicroBatchSearch, _size
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from tests.training.bag_encoder import random_batch

pytestmark = pytest.mark.gpu
SHARE, LENGTHS, GIB = 96, (64, 256), 2**30


def make_search() -> MicroBatchSearch:
    """BERT-base, untrained, and batches of short texts."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    encoder = SpladeEncoder(random_bert(30522, seed=0), SpartonHead()).to(device).train()
    penalties = {"l1": Regularizer(l1, 0.01)}, {"flops": Regularizer(flops, 0.1)}
    objective = Objective(InfoNCE(), *penalties)
    step = ExactStep(encoder, objective, World(0, 1, device), Precision("bf16", device))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)
    return MicroBatchSearch(step, optimizer, *LENGTHS)


def peak(run) -> int:
    """Most bytes that a call takes beyond those that were taken."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def batch():
    return random_batch(SHARE, 0, seed=0)


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_a_rehearsal_takes_the_memory_of_a_step(parts):
    search = make_search()
    step, longest = search.step, search._longest(batch())
    size = _size(SHARE, parts)
    part = longest._replace(
        queries=longest.queries.select(0, size), documents=longest.documents.select(0, size)
    )
    for run in (lambda: step.rehearse(part, parts), lambda: step(longest, 0)):  # kernels are loaded
        step.micro_batch = size
        run()
        search.optimizer.zero_grad()
    rehearsed = peak(lambda: step.rehearse(part, parts))
    search.optimizer.zero_grad()
    real = peak(lambda: step(longest, 0))
    assert 0.98 * real < rehearsed < 1.1 * real


LIMITED = """
import sys, time, torch
from tests.training.test_micro_batch_gpu import GIB, SHARE, batch, make_search
gib = float(sys.argv[1])
torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])
search = make_search()
torch.cuda.mem_get_info = lambda device=None: (0, gib * GIB)
search(short := batch())
size = search.step.micro_batch
begin = time.perf_counter()
search.search(short)
seconds = time.perf_counter() - begin
longest = search._longest(short)
for step in range(3):
    search.step(longest, step)
    search.optimizer.step()
    search.optimizer.zero_grad()
search.step.micro_batch = None
try:
    search.step(longest, 3)
    whole = "fits"
except torch.OutOfMemoryError:
    whole = "does not fit"
print(size, round(seconds, 1), whole)
"""


@pytest.mark.alone
@pytest.mark.parametrize(("gib", "fits"), [(6, False), (40, True)])
def test_what_is_found_fits_and_is_not_all_where_all_does_not(gib, fits):
    """In a process of its own, whose memory is limited."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        (sys.executable, "-c", LIMITED, str(gib)),
        cwd=root, env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    size, seconds, whole = run.stdout.split(maxsplit=2)
    assert (int(size) == SHARE) == fits
    assert int(size) >= SHARE // 16
    assert whole.strip() == ("fits" if fits else "does not fit")
    assert float(seconds) < 20
