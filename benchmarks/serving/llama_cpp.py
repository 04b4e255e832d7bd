"""llama.cpp's own server (xllamacpp, from PyPI) for `python -m benchmarks.serving`: slots share one cache of n tokens."""

from __future__ import annotations

import argparse
import os
import signal

import xllamacpp


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the cache, at most the model's positions")
    options = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.port = options.model, options.port
    parameters.n_ctx, parameters.n_parallel, parameters.kv_unified = options.tokens, options.rows, True
    for processor in (parameters.cpuparams, parameters.cpuparams_batch):
        processor.n_threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    server = xllamacpp.Server(parameters)
    signal.pause()
    del server


if __name__ == "__main__":
    main()
