"""One rank of one engine: `python -m hf_dist.tools.bench.rank WORK.json`, started by `processes.py`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from hf_dist.dist.rendezvous import CONNECTIONS
from hf_dist.hf.model_class import model_class
from hf_dist.tools.bench.engines import ENGINES
from hf_dist.tools.bench.meter import Meter
from hf_dist.tools.bench.wire import DispatchCounter, OwnCounter
from hf_dist.tools.bench.work import read_work

__all__ = ["main", "result_file"]


def result_file(folder: str, rank: int) -> Path:
    """The file for a rank's measurements."""
    return Path(folder) / f"rank_{rank}.json"


def main(path: str) -> None:
    """Train, measure, write the result, and exit when all ranks are done."""
    work, contender = read_work(Path(path))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if work.device == "cuda":
        os.environ.setdefault(CONNECTIONS, "32")  # before CUDA starts; every engine is timed with the queues of ours
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    module = importlib.import_module(f"hf_dist.tools.bench.engines.{contender.engine}")
    model_class(work.class_name)
    counter = OwnCounter() if ENGINES[contender.engine].is_ours else DispatchCounter()
    meter = Meter(work, counter, imported=time.time())
    module.make(work, contender, rank).run(meter)
    own = result_file(work.folder, rank)
    own.with_suffix(".new").write_text(json.dumps(meter.found), encoding="utf-8")
    own.with_suffix(".new").rename(own)
    everyone = [result_file(work.folder, each) for each in range(work.ranks)]
    until = time.monotonic() + 60
    while time.monotonic() < until and not all(each.exists() for each in everyone):
        time.sleep(0.05)  # others may still be reading data from this process
    sys.stdout.flush()
    os._exit(0)  # threads of some engines abort at interpreter exit


if __name__ == "__main__":
    main(sys.argv[1])
