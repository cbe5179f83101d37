"""Run llama.cpp's server, from the package xllamacpp, until SIGTERM: a peer for peers.py.

    python -m venv llama && llama/bin/pip install xllamacpp
    llama/bin/python benchmarks/llama_cpp_server.py FILE.gguf --port 8002 --slots 8

It needs nothing but xllamacpp, so that it can have an environment of its own.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path


def main() -> None:
    """Serve a GGUF file; every slot has room for `--context` tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import xllamacpp  # type: ignore[import-not-found]  # not of this project's environment

    params = xllamacpp.CommonParams()
    params.model.path = str(args.file)
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel, params.n_ctx = args.slots, args.slots * args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
