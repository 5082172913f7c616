"""Cells as jobs of a cluster, which Hydra's submitit launcher submits."""

import os

from torch.distributed import is_torchelastic_launched


def refuse_torchrun() -> None:
    """Refuse a sweep inside of a process that ``torchrun`` has started.

    Raises:
        ValueError: this is such a process.
    """
    if is_torchelastic_launched():
        raise ValueError(
            "a sweep starts its processes itself: start it without torchrun, and set gpus"
        )


def join_job() -> int | None:
    """Make the tasks of a job that has several the ranks of one process group, described in the
    environment as ``torchrun`` describes it, for the process that each of them starts.

    Returns:
        This task's rank; None where there is no job, or one with a single task.
    """
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return None
    from submitit.helpers import TorchDistributedEnvironment

    job = TorchDistributedEnvironment()
    if job.world_size == 1:
        return None
    job.export(set_cuda_visible_devices=False, overwrite=True)
    return job.rank
