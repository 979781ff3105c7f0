"""No record of any reply ends a run of any app, however it is spoilt, and it costs its node alone.

That a method ends as if a spoilt reply had been lost is a contract; here each record of each reply is spoilt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests.flower_apps.cases import CEPS, FEDMUD, HSGD, SD_FEEL, SIMILARITY_FREE, AppCase
from tests.flower_apps.hsgd_own import files

from hedgerow.strategies import PairingError, RosterError, TooFewRepliesError
from hedgerow.tasks import load_vertical, write_split
from hedgerow.wire import BatchHandler, Call

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


def _of(record: Any, items: Any) -> Any:
    changed = type(record)()
    for key, value in items:
        changed[key] = value
    return changed


def _other_kind(record: Any) -> Any:
    return MetricRecord({"a": 1}) if isinstance(record, ConfigRecord) else ConfigRecord({"a": "x"})


SPOILT: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "renamed": lambda name, one: {"x": one},
    "removed": lambda name, one: {},
    "of another kind": lambda name, one: {name: _other_kind(one)},
    "values of another type": lambda name, one: {name: _of(one, [(k, retyped(v)) for k, v in one.items()])},
    "half of the keys": lambda name, one: {name: _of(one, list(one.items())[: len(one) // 2])},
    "half of each value": lambda name, one: {name: _of(one, [(k, truncated(v)) for k, v in one.items()])},
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
RUNS: dict[str, tuple[AppCase, dict[str, Any]]] = {
    "sd-feel": (SD_FEEL, {"iterations": 4}),
    "sd-feel-sums": (SD_FEEL, {"method": "fedavg", "iterations": 4, "clients-per-round": 6, **_SUMS}),
    "sd-feel-edges": (SD_FEEL, {"edge-servers": "nodes", "num-clients": 6}),
    "sd-feel-probes": (SD_FEEL, {"probe-rounds": 1}),
    "similarity-free": (SIMILARITY_FREE, {"num-rounds": 2}),
    "similarity-free-probes": (SIMILARITY_FREE, {"probe-rounds": 1, "checkpoint-nodes": "always"}),
    "similarity-free-sums": (SIMILARITY_FREE, {"algorithm": "fedavg", "num-rounds": 2, **_SUMS}),
    "fedmud": (FEDMUD, {"num-rounds": 2}),
    "fedmud-sums": (FEDMUD, {"num-clients": 5, "clients-per-round": 5, "num-rounds": 2, **_SUMS}),
    "ef21-p": (FEDMUD, {"method": "ef21-p"}),
    "fedbat": (FEDMUD, {"method": "fedbat"}),
    "ceps": (CEPS, {"iterations": 6, "sealed": False}),
    "ceps-sealed": (CEPS, {"sealed": True}),
    "d-psgd": (CEPS, {"method": "d-psgd"}),
    "hsgd": (HSGD, {"iterations": 4, "sealed": False}),
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


@pytest.mark.parametrize("name", ["sd-feel-sums", "ceps", "hsgd"])
def test_no_reply_ends_a_run_and_it_costs_its_node_alone(name: str, tmp_path: Path) -> None:
    ways = list(SPOILT)
    check_all(*RUNS[name], tmp_path, lambda number: iter([ways[number % len(ways)]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_record_of_any_reply_ends_a_run_however_it_is_spoilt(name: str, tmp_path: Path) -> None:
    check_all(*RUNS[name], tmp_path, lambda number: iter(SPOILT))


@pytest.mark.slow
@pytest.mark.parametrize("case", [SD_FEEL, HSGD], ids=lambda case: case.name)
def test_no_reply_about_local_data_ends_a_run(case: AppCase, tmp_path: Path) -> None:
    own: dict[str, Any] = {"partition": "own", "standardise": "federated", "iterations": 4}
    if case is HSGD:
        configs = files(tmp_path / "parties", 12, 2, "devices")
        own |= {"num-groups": 2, "classes": ",".join(load_vertical("breast-cancer").classes)}
    else:
        write_split("mnist-5k", tmp_path / "parties", 6, "iid")
        configs = [{"data": str(tmp_path / "parties" / f"node-{i}.npz")} for i in range(6)]
        own |= {"classes": "10", "model": "logistic"}
    own |= {"num-clients": len(configs), "node_configs": configs}
    check_all(case, own, tmp_path, lambda number: iter(SPOILT))
