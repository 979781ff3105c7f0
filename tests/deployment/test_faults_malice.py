"""A node that answers anything but what it was asked for: dropped, counted by reason, averaged by nobody."""

import shutil
from pathlib import Path

import pytest
from tests.deployment.trials import APPS, Lapse, different, engine, trial

pytestmark = pytest.mark.slow

# The app's own client, and what a node makes of its answers whose config has ``lies``, one a round.
LIAR = """
import math
from collections.abc import Sequence

import numpy as np
from flwr.app import Array, RecordDict

from hedgerow.clients import sd_feel_client
from hedgerow.clients import BatchClientApp
from hedgerow.wire import Call

honest = sd_feel_client()


def lie(kind: str, reply: RecordDict) -> None:
    arrays = reply["arrays"]
    key = next(iter(arrays))
    values = arrays[key].numpy()
    if kind == "nan":
        arrays[key] = Array(np.full_like(values, math.nan))
    elif kind == "key":
        arrays["backdoor"] = arrays.pop(key)
    elif kind == "shape":
        arrays[key] = Array(values[..., :-1].copy())
    elif kind == "huge":
        arrays[key] = Array(np.zeros(2**24, np.float32))
    elif kind == "header":
        # A header that promises a terabyte, and nothing behind it.
        data = Array(np.zeros((0, 2**19), np.float32)).data
        data = data.replace(b"(0, 524288), }     ", b"(524288, 524288), }")
        arrays[key] = Array("float32", (2**19, 2**19), "numpy.ndarray", data)


def train(calls: Sequence[Call]) -> list[RecordDict | Exception]:
    answers = list(honest.batch_handler("train")(calls))
    for call, answer in zip(calls, answers, strict=True):
        lies = str(call.context.node_config.get("lies", "")).split()
        if lies:
            lie(lies[int(call.content["config"]["server-round"]) - 1], answer)
    return answers


app = BatchClientApp(
    {kind: honest.batch_handler(kind) for kind in ("query.whoami", "evaluate")} | {"train": train}
)
"""

REASONS = {
    "nan": "non-finite",
    "key": "missing key",
    "shape": "wrong shape",
    "huge": "wrong shape",
    "header": "undecodable",
}
CONFIG = (
    f"method=fedavg tau1=1 tau2=1 iterations={len(REASONS)} batch-size=5 model=logistic evaluate-every=1 "
    "quarantine-after=0"
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The app ``sd_feel`` with the client above in its client's place."""
    folder = tmp_path / "app"
    shutil.copytree(APPS / "sd-feel", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sd_feel" / "liar.py").write_text(LIAR)
    project = (folder / "pyproject.toml").read_text()
    assert "sd_feel.client_app:app" in project
    (folder / "pyproject.toml").write_text(project.replace("sd_feel.client_app:app", "sd_feel.liar:app"))
    return folder


def test_lies_are_counted_by_reason_and_leave_no_trace_in_the_average(app: Path, tmp_path: Path) -> None:
    node_config = [{}, {}, {"lies": " ".join(REASONS)}]
    with trial(app, 3, CONFIG, tmp_path / "there", node_config=node_config) as one:
        run = one.end()
    assert run.lost == [{reason: 1} for reason in REASONS.values()]
    # All that it was asked for but who it is.
    silent = Lapse(2, range(2, 2 + len(REASONS)))
    here = engine("sd_feel", 3, CONFIG, tmp_path / "here", silent)
    assert different(run.model, here.model) == []
