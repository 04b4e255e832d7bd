"""A second device in the place of a GPU: the CPU computes for it, and it refuses what a GPU refuses.

Importing this module makes it torch's accelerator, so tests that use it run in a process of their own (`test_devices.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
_setup_privateuseone_for_python_backend(NAME)
torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) then makes it on the CPU, and copies
torch.__future__.set_swap_module_params_on_conversion(True)  # tied parameters of a model that is moved stay tied
DEVICE = torch.device(NAME, 0)
#: Operations that take tensors of several devices, as on a GPU.
CROSSING = ("aten::_to_copy", "aten::copy_")


class ElsewhereTensor(Tensor):
    """A tensor on the second device.

    Attributes:
        data_here: its numbers, on the CPU.
    """

    data_here: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool | None = None) -> Any:
        """Return a tensor of numbers on the CPU, or, with ``requires_grad``, a parameter as `torch.nn.Parameter` does."""
        if requires_grad is not None:
            return torch.nn.Parameter(data, requires_grad=requires_grad)
        made = Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
        )
        made.data_here = data
        return made

    def tolist(self) -> Any:
        return self.data_here.tolist()

    def untyped_storage(self) -> Any:
        return self.data_here.untyped_storage()

    def data_ptr(self) -> int:
        return self.data_here.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """Makes the device usable inside."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and return tensors on the device that the result belongs to."""
    name, tensors = function._schema.name, [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    ours = [each for each in tensors if isinstance(each, ElsewhereTensor)]
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    there = bool(ours) if device is None else device.type == NAME
    if not (ours or there):
        return function(*args, **kwargs)
    if ours and name not in CROSSING and any(each.dim() for each in tensors if not isinstance(each, ElsewhereTensor)):
        places = [f"{tuple(each.shape)} on {each.device}" for each in tensors]
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {', '.join(places)}")
    if name == "aten::copy_":
        there = isinstance(args[0], ElsewhereTensor)
    given = {id(each.data_here): each for each in ours}

    def here(value: Any) -> Any:
        return value.data_here if isinstance(value, ElsewhereTensor) else value

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or not there:
            return value
        return given[id(value)] if id(value) in given else ElsewhereTensor(value)

    if there and device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return tree_map(back, function(*tree_map(here, args), **tree_map(here, kwargs)))
