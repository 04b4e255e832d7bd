"""The device that a model computes on, by its name."""

from __future__ import annotations

import torch

from ..errors import InputError


def find_device(name: str) -> torch.device:
    """Return the device of a name such as cpu, cuda or cuda:1.

    "auto" is the accelerator that torch finds, or else the CPU. Apple's is left out, for it lacks float64, which conversion
    computes in.

    Raises:
        InputError: if there is no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None or accelerator.type == "mps" else str(accelerator)
    try:
        device = torch.empty(0, device=name).device  # cuda is cuda:0 then
    except (RuntimeError, AssertionError) as error:  # the latter by a torch without CUDA
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot compute on the device {name!r}: {reason}. Pass cpu, cuda, or auto.") from error
    if device.type == "meta":
        raise InputError("a model on the device 'meta' has no numbers. Pass cpu, cuda, or auto.")
    return device
