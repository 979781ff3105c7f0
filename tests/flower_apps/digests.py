"""What runs of the apps come to: digests of final models and records, told as JSON.

Run as a program, so that the libraries' instruction sets can be set from outside.
"""

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from hedgerow.clients import BatchClientApp
from hedgerow.sim import find_app, load_app, plan_run, run_app

ROOT = Path(__file__).parents[2]
for _app in (ROOT / "flower_apps").iterdir():
    if str(_app) not in sys.path:
        sys.path.append(str(_app))

# What each run is of, and the settings; those with the loop are the ones that need it for their bits.
RUNS = {
    "sd-feel": "num-clients=5 num-servers=2 topology=path tau1=2 tau2=2 alpha=3 participation=0.8 "
    "batch-size=5 iterations=8",
    "similarity-free": "num-clients=5 partition=iid local-iters=2 batch-size=5 num-rounds=3 fixed-c=0.3",
    "similarity-free prox": "algorithm=ef-fedprox num-clients=4 partition=iid inner-steps=4 batch-size=5 "
    "num-rounds=2 fixed-c=0.3",
    "fedmud": "num-clients=4 clients-per-round=3 batch-size=64 num-rounds=2 model=mlp skip-front=0 "
    "ratio=0.25 init-a=0.1 training-mode=loop",
    "fedmud cnn4": "num-clients=3 clients-per-round=2 batch-size=64 num-rounds=1 local-epochs=1 model=cnn4 "
    "training-mode=loop train-loss-samples=100",
    "ceps": "num-clients=6 topology=complete iterations=12 interval-low=3 interval-high=5 features=800 "
    "sparsity=4 measurements=400",
    "hsgd": "num-groups=2 num-clients=4 patients-per-group=10 participation=0.4 iterations=8 "
    "global-interval=4 local-interval=2 training-mode=loop",
    "hsgd cnn": "dataset=mnist-5k num-groups=2 num-clients=4 patients-per-group=10 participation=0.4 "
    "iterations=4 global-interval=4 local-interval=2 training-mode=loop",
}
# One of each family is also run in worker processes.
IN_WORKERS = ("sd-feel", "fedmud", "ceps", "hsgd")


def digests(run: str, *, brief: bool = False) -> dict[str, str]:
    """Digests of a run by threads, by how nodes are called and in how many processes.

    ``brief`` compares the two ends of threads and calls alone.
    """
    cases = list(itertools.product((1, 2), (True, False)))
    before = torch.get_num_threads()
    try:
        found = {
            f"{threads} threads, {'together' if together else 'one by one'}": digest(run, threads, together)
            for threads, together in ([cases[0], cases[-1]] if brief else cases)
        }
        for workers in (2, 3) if run in IN_WORKERS else ():
            found[f"{workers} workers"] = digest(run, 1, together=True, workers=workers)
        return found
    finally:
        torch.set_num_threads(before)


def digest(run: str, threads: int, together: bool, workers: int = 1) -> str:
    """Return the digest of one run."""
    torch.set_num_threads(threads)
    folder = ROOT / "flower_apps" / run.split(maxsplit=1)[0]
    found = hashlib.sha256()
    batched = contextlib.nullcontext() if together else patch.object(BatchClientApp, "batch_handler", _none)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()), batched:
        asked = [RUNS[run], f"output-dir='{out}' quiet=true evaluate-every=4"]
        plan = plan_run(find_app(folder), asked, workers=workers)
        run_app(load_app(folder), plan)
        (made,) = Path(out).iterdir()
        if run.split(maxsplit=1)[0] != "ceps":  # Its models stay on the nodes.
            with np.load(made / "model.npz") as model:
                for key in sorted(model.files):
                    found.update(model[key].tobytes())
        for line in (made / "rounds.jsonl").read_text().splitlines():
            record = json.loads(line)
            del record["wall_seconds"]
            found.update(json.dumps(record, sort_keys=True).encode())
    return found.hexdigest()[:16]


def _none(self: BatchClientApp, message_type: str) -> None:
    """Answer as an app does that takes messages alone."""


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(json.dumps({run: digests(run) for run in RUNS}))
