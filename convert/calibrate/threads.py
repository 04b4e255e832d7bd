"""Functions that run side by side on a processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_together(functions: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yield what functions return that run at the same time, without gradients, each on its part of a processor's threads.

    Most operations of a layer's fit are small, and gain less by a second thread than two layers do.
    """
    call = torch.no_grad()(lambda function: function())
    if len(functions) < 2:
        yield from map(call, functions)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(functions)))  # which threads that begin now take over
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            yield from pool.map(call, functions)
    finally:
        torch.set_num_threads(threads)
