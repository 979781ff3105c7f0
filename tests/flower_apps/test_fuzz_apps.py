"""A reply that is broken in any way is as if there were none: whole runs of every app, bit for bit."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests.flower_apps.cases import CASES, CEPS, FEDMUD, HSGD, SD_FEEL, SIMILARITY_FREE, AppCase
from tests.flower_apps.hsgd_own import files
from tests.wire.fuzzing import Rng, pick

from hedgerow.strategies import PairingError, RosterError, TooFewRepliesError
from hedgerow.tasks import load_vertical, write_split
from hedgerow.wire import BatchHandler, Call, to_record, view


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


# Each record of each reply of one node.

Spoil = Callable[[str, RecordDict], RecordDict]
# Node, all of whose replies of one type are spoilt.
_LIAR = 1
# How a run may end: too few nodes are left, or too few replies.
_ENDS = (RosterError, TooFewRepliesError, PairingError)


class OneLiar(ClientApp):
    """An app of which one node's answers are spoilt on their way."""

    def __init__(self, honest: Any, spoil: Spoil) -> None:
        super().__init__()
        self._honest, self._spoil = honest, spoil

    def batch_handler(self, kind: str) -> BatchHandler | None:
        honest: BatchHandler | None = self._honest.batch_handler(kind)
        if honest is None:
            return None

        def handle(calls: Sequence[Call]) -> list[Any]:
            answers = zip(calls, honest(calls), strict=True)
            return [
                self._spoil(kind, answer)
                if call.partition_id == _LIAR and isinstance(answer, RecordDict)
                else answer
                for call, answer in answers
            ]

        return handle


def truncated(value: Any) -> Any:
    if isinstance(value, Array):
        return Array(value.dtype, value.shape, value.stype, value.data[: len(value.data) // 2])
    return value[: len(value) // 2] if isinstance(value, bytes | str | list) else value


def retyped(value: Any) -> Any:
    if isinstance(value, Array):
        return Array(np.zeros(2))
    return 1 if isinstance(value, list) else [1.5]


def _values(record: Any, change: Callable[[Any], Any]) -> Any:
    changed = type(record)()
    for key, value in record.items():
        changed[key] = change(value)
    return changed


def _other_kind(record: Any) -> Any:
    return MetricRecord({"a": 1}) if isinstance(record, ConfigRecord) else ConfigRecord({"a": "x"})


def _without_half(record: Any) -> Any:
    changed = type(record)()
    for key in list(record)[: len(record) // 2]:
        changed[key] = record[key]
    return changed


SPOILT: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "renamed": lambda name, record: {"x": record},
    "removed": lambda name, record: {},
    "of another kind": lambda name, record: {name: _other_kind(record)},
    "values of another type": lambda name, record: {name: _values(record, retyped)},
    "half of the keys": lambda name, record: {name: _without_half(record)},
    "half of each value": lambda name, record: {name: _values(record, truncated)},
}


def spoiling(kind: str, name: str, how: str) -> Spoil:
    def spoil(answered: str, content: RecordDict) -> RecordDict:
        if answered != kind or name not in content:
            return content
        changed: dict[str, Any] = {}
        for key, record in content.items():
            changed |= SPOILT[how](key, record) if key == name else {key: record}
        return RecordDict(changed)

    return spoil


def rounds_with(case: AppCase, folder: Path, spoil: Spoil, changes: Mapping[str, Any]) -> list[Any]:
    folder.mkdir()
    liar = replace(case)
    liar.__dict__["loaded"] = replace(case.loaded, client_app=OneLiar(case.loaded.client_app, spoil))
    return liar.run(folder, quiet=True, workers=1, **changes)


def records_told(case: AppCase, folder: Path, changes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the message types and names of all records that a node answers with in an honest run."""
    found: dict[tuple[str, str], None] = {}

    def note(kind: str, content: RecordDict) -> RecordDict:
        found.update(dict.fromkeys((kind, name) for name in content))
        return content

    rounds_with(case, folder, note, changes)
    return list(found)


_SUMS = {"secure-sum": True}
_EDGES = {"num-groups": 3, "num-clients": 6, "layout": "edges"}
QUICK: dict[str, tuple[AppCase, dict[str, Any]]] = {
    "sd-feel": (SD_FEEL, {"iterations": 4}),
    "sd-feel-sums": (SD_FEEL, {"method": "fedavg", "iterations": 4, "clients-per-round": 6, **_SUMS}),
    "similarity-free": (SIMILARITY_FREE, {"num-rounds": 2}),
    "fedmud": (FEDMUD, {"num-rounds": 2}),
    "ceps": (CEPS, {"iterations": 6, "sealed": False}),
    "hsgd": (HSGD, {"iterations": 4, "sealed": False}),
}
THOROUGH = {
    **QUICK,
    "sd-feel-edges": (SD_FEEL, {"edge-servers": "nodes", "num-clients": 6}),
    "sd-feel-probes": (SD_FEEL, {"probe-rounds": 1}),
    "similarity-free-probes": (SIMILARITY_FREE, {"probe-rounds": 1, "checkpoint-nodes": "always"}),
    "similarity-free-sums": (SIMILARITY_FREE, {"algorithm": "fedavg", "num-rounds": 2, **_SUMS}),
    "fedmud-sums": (FEDMUD, {"num-clients": 5, "clients-per-round": 5, "num-rounds": 2, **_SUMS}),
    "ef21-p": (FEDMUD, {"method": "ef21-p"}),
    "fedbat": (FEDMUD, {"method": "fedbat"}),
    "ceps-sealed": (CEPS, {"sealed": True}),
    "d-psgd": (CEPS, {"method": "d-psgd"}),
    "hsgd-sums": (HSGD, {"iterations": 4, **_EDGES, **_SUMS}),
    "hsgd-sealed": (HSGD, {"sealed": True}),
    "hsgd-estimates": (HSGD, {"method": "c-hsgd", "adaptive": "observe", "sealed": False}),
}


def check_all(
    case: AppCase, changes: Mapping[str, Any], tmp_path: Path, ways: Callable[[int], Iterator[str]]
) -> None:
    told = records_told(case, tmp_path / "honest", changes)
    assert len(told) >= 3
    for number, (kind, record) in enumerate(told):
        # Without one node no run begins, and one of few groups is many.
        may_end = kind.startswith("query.") or case is HSGD
        for how in ways(number):
            what = f"{kind}, {record!r} {how}"
            try:
                rounds = rounds_with(case, tmp_path / what, spoiling(kind, record, how), changes)
            except Exception as error:
                if not (may_end and isinstance(error, _ENDS)):
                    pytest.fail(f"{what}: {type(error).__name__}: {error}")
            else:
                lost = [one["sent"] - one["accepted"] for one in rounds if "sent" in one]
                assert case in (CEPS, HSGD) or max(lost) <= 1, what


@pytest.mark.parametrize("name", QUICK)
def test_no_reply_ends_a_run_and_it_costs_its_node_alone(name: str, tmp_path: Path) -> None:
    first, *ways = SPOILT
    check_all(*QUICK[name], tmp_path, lambda number: iter([first, ways[number % len(ways)]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", THOROUGH)
def test_no_record_of_any_reply_ends_a_run_however_it_is_spoilt(name: str, tmp_path: Path) -> None:
    check_all(*THOROUGH[name], tmp_path, lambda number: iter(SPOILT))


@pytest.mark.slow
@pytest.mark.parametrize("case", [SD_FEEL, HSGD], ids=lambda case: case.name)
def test_no_reply_about_local_data_ends_a_run(case: AppCase, tmp_path: Path) -> None:
    own: dict[str, Any] = {"partition": "own", "standardise": "federated"}
    if case is HSGD:
        configs = files(tmp_path / "parties", 12, 2, "devices")
        own |= {"num-groups": 2, "iterations": 4, "classes": ",".join(load_vertical("breast-cancer").classes)}
    else:
        write_split("mnist-5k", tmp_path / "parties", 6, "iid")
        configs = [{"data": str(tmp_path / "parties" / f"node-{i}.npz")} for i in range(6)]
        own |= {"iterations": 4, "classes": "10", "model": "logistic"}
    own |= {"num-clients": len(configs), "node_configs": configs}
    check_all(case, own, tmp_path, lambda number: iter(SPOILT))
