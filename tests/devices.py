"""What tests find out about a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, what waits for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
