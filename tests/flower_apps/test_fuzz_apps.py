"""A reply that is broken in any way is as if there were none: whole runs of every app, bit for bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from tests.flower_apps.cases import CASES, AppCase
from tests.wire.fuzzing import Rng, pick

from hedgerow.wire.records import to_record, view


def _is_part_of_the_run(content: RecordDict) -> bool:
    """Whether a reply is no introduction, without which no run begins, and no monitor's look at a model."""
    looks = any("mean-objective" in m or "objective" in m for m in content.metric_records.values())
    return not {"whoami", "hello", "pair"} & set(content) and not (looks and content.array_records)


def _broken_array(array: Array, rng: Rng) -> Array:
    values = view(array)
    stated = str(values.dtype), tuple(map(int, values.shape))
    ways: list[Callable[[], Array]] = [
        lambda: Array(np.full(values.shape, np.nan)),
        lambda: Array(np.zeros((2, 0, 3), np.float32)),
        lambda: to_record({"": np.full(values.shape, "text")})[""],
        lambda: to_record({"": values.astype(complex)})[""],
        lambda: Array(*stated, "numpy.ndarray", array.data[:-1]),
        lambda: Array(*stated, "numpy.ndarray", b"\x80\x04."),
        lambda: Array(*stated, "pickle", array.data),
    ]
    return pick(rng, ways)()


def _broken_record(record: Any, rng: Rng) -> Any:
    if isinstance(record, MetricRecord):
        return MetricRecord(dict.fromkeys(record, float("nan")))
    if isinstance(record, ConfigRecord):
        return ConfigRecord(dict.fromkeys(record, pick(rng, ("broken", 0.5, [b"", b"x"], True))))
    changed, key = record.copy(), pick(rng, list(record))
    match int(rng.integers(4)):
        case 0:
            changed[f"{key}?"] = changed.pop(key)
        case 1:
            changed["more"] = changed[key]
        case _:
            changed[key] = _broken_array(changed[key], rng)
    return changed


def broken(content: RecordDict, kind: str, *, rng: Rng, count: list[int]) -> RecordDict:
    """Return a reply that no strategy may use."""
    names = [name for name, record in content.items() if len(record)]
    if not _is_part_of_the_run(content) or not names:
        return content
    count[0] += 1
    name = pick(rng, names)
    changed = content.copy()
    match int(rng.integers(4)):
        case 0:
            del changed[name]
        case 1:
            swapped = isinstance(content[name], ArrayRecord)
            changed[name] = ConfigRecord({"a": 1}) if swapped else ArrayRecord()
        case _:
            changed[name] = _broken_record(changed[name], rng)
    return changed


def silent(content: RecordDict, kind: str, *, count: list[int]) -> RecordDict:
    """Return a reply that says nothing."""
    if not _is_part_of_the_run(content):
        return content
    count[0] += 1
    return RecordDict()


# More would lose whole groups, and end the run.
_RATES = {"hsgd": 0.05}


def run(
    case: AppCase, folder: Path, monkeypatch: pytest.MonkeyPatch, corrupted: Any, **changes: Any
) -> tuple[list[Any], int]:
    """Return each round's replies and losses, and what was lost by reason in all."""
    folder.mkdir()
    monkeypatch.setattr("hedgerow.sim.engine.grid.corrupted", corrupted)
    faults = {
        "fault-corrupt": "nan",
        "fault-corrupt-rate": _RATES.get(case.name, 0.15),
        "min-replies": 1,
        "seed": 2,
    }
    rounds = case.run(folder, **faults, **changes)
    (output,) = folder.iterdir()
    lost = json.loads((output / "summary.json").read_text())["lost-replies"]
    told = [(r["round"], r["accepted"], (r["central"] or {}).get("loss")) for r in rounds]
    return told, sum(lost.values())


def compare(case: AppCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    wrong, nothing = [0], [0]
    spoil = partial(broken, rng=np.random.default_rng(4), count=wrong)
    with_broken, lost = run(case, tmp_path / "broken", monkeypatch, spoil, **changes)
    without, lost_too = run(case, tmp_path / "silent", monkeypatch, partial(silent, count=nothing), **changes)
    assert with_broken == without
    assert wrong == nothing
    assert lost == lost_too > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_reply_is_as_if_there_were_none(
    case: AppCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(case, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "method"),
    [(case, method) for case in CASES for method in case.methods],
    ids=[f"{case.name}-{method}" for case in CASES for method in case.methods],
)
def test_a_broken_reply_of_any_method_is_as_if_there_were_none(
    case: AppCase, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(case, tmp_path, monkeypatch, **{case.method: method})
