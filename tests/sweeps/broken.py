"""Optimizers for cells that cannot end well: the ``_target_`` of a configuration."""

import os
import signal

import torch


def out_of_memory(*_, **__):
    """As torch.compile reports it: the error of memory inside of another."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    except torch.OutOfMemoryError:
        raise NotImplementedError("the backend raised") from None


def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(torch.optim.AdamW):
    """Goes the way that the environment variable ``END`` says, ``<rank> <how>``, at step 3."""

    def step(self, *arguments, **settings):
        own = os.environ.get("RANK", "0")
        rank, how = os.environ.get("END", "- -").split()
        self.count = getattr(self, "count", 0) + 1
        if rank == own and self.count == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how != "nan":
                raise RuntimeError(f"{how} on rank {rank}")
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_mul_(group["params"], float("nan"))
        return super().step(*arguments, **settings)
