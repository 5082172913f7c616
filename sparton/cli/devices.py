"""Devices of a command's processes."""

import torch


def check_gpus(gpus: int, device: str | None) -> None:
    """Refuse more processes than GPUs, where they would use some.

    Raises:
        ValueError: names both settings.
    """
    if device is not None and device != "cpu":
        raise ValueError(
            f"gpus={gpus} are as many devices, and device={device} is one: leave one out"
        )
    found = torch.cuda.device_count()
    if device is None and 0 < found < gpus:
        has = "1 GPU" if found == 1 else f"{found} GPUs"
        raise ValueError(f"gpus={gpus}, but this machine has {has}: set gpus={found}")
