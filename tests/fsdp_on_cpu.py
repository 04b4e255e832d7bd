"""Runs ``hf-rfa`` with parameters sharded on CPUs, for tests: accelerate shards on accelerators only, and says nothing of it.

torchrun --nproc_per_node 2 -m tests.fsdp_on_cpu finetune … --fsdp full_shard --fsdp_config FILE --use_cpu
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor

from hf_rfa.finetune.trainers import GroupedTrainer
from hf_rfa_cli.main import main

_init = AcceleratorState.__init__
_training_step = GroupedTrainer.training_step


def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    """Make the state, and shard if that was asked for."""
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Take a step of a model that is sharded indeed."""
    sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    assert all(sharded), f"{sum(sharded)} of {len(sharded)} parameters are sharded"
    return _training_step(self, model, *args, **kwargs)


if __name__ == "__main__":
    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    GroupedTrainer.training_step = training_step  # type: ignore[method-assign]
    main()
