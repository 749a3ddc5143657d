"""Copy tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. On CUDA, the copy does not wait for queued work.

    Elsewhere, it waits. On Apple's GPUs, a copy that does not wait may read memory that is used for something else by then.
    """
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # only copies from pinned memory do not wait
