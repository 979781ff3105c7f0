"""Whatever numbers one node reports, the run goes on; what cannot be is refused under a reason."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from tests.contracts.plays import METHODS, VARIANTS, Method, Passed, passing, play
from tests.flower_apps.cases import CASES, CEPS

CHOSEN = [
    *(Method(case, case.method) for case in CASES if case is not CEPS),
    *(one for one in METHODS if one.name in ("dp-dsgt", "jfl", "tdcd")),
    *(one for one in VARIANTS if one.changes.get("layout") == "devices" and one.name == "hsgd"),
    Method(CEPS, "ceps", {"interval-low": 1, "interval-high": 12}),
]
LIES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "minus": -1,
    "1e308": 1e308,
    "2**62": 2**62,
    "list": [1.0] * 200_000,
}
# Not of a round: introductions.
BEFORE = ("query.whoami", "query.pair", "query.state")
# Which node lies.
LIAR = 1


def places(passed: list[Passed]) -> Iterator[tuple[str, str, str]]:
    """Yield each number that the node reports: the message type, the record and the key."""
    seen = set()
    for one in passed:
        if one.partition != LIAR or one.reply.has_error() or one.kind in BEFORE:
            continue
        for name, record in one.reply.content.items():
            for key, value in record.items() if not isinstance(record, ArrayRecord) else ():
                number = value[0] if isinstance(value, list) and value else value
                place = one.kind, name, key
                if isinstance(number, int | float) and place not in seen:
                    seen.add(place)
                    yield place


def changed(content: RecordDict, name: str, key: str, value: Any) -> RecordDict | None:
    """Return a reply with another number; None if no message can hold it there."""
    record = content[name]
    assert isinstance(record, MetricRecord | ConfigRecord)
    try:
        other = type(record)({**record, key: value})
    except (TypeError, ValueError):
        return None
    return RecordDict({**content, name: other})


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield value


class Liar:
    """Tells the lies of a list at one place of successive replies, and keeps the round of each."""

    def __init__(self, place: tuple[str, str, str], lies: list[str]) -> None:
        self.place, self.lies = place, lies
        self.told: dict[str, int] = {}

    def __call__(self, one: Passed) -> RecordDict | None:
        kind, name, key = self.place
        if (one.partition, one.kind) != (LIAR, kind) or one.reply.has_error() or not self.lies:
            return None
        if name not in one.reply.content or key not in one.reply.content[name]:
            return None
        while self.lies:
            lie = self.lies.pop(0)
            if (other := changed(one.reply.content, name, key, LIES[lie])) is not None:
                self.told[lie] = int(one.instruction.metadata.group_id.partition("-")[0] or 0)
                return other
        return None


@pytest.mark.parametrize("method", CHOSEN, ids=str)
def test_a_number_that_cannot_be_costs_its_own_reply(method: Method, tmp_path: Path) -> None:
    with passing() as honest:
        play(method, tmp_path)

    for at, place in enumerate(places(honest)):
        kind, name, key = place
        # At each place another lie is the first one.
        lies = [*list(LIES)[at % len(LIES) :], *list(LIES)[: at % len(LIES)]]
        while lies:
            left = len(lies)
            liar = Liar(place, lies)
            with passing(liar):
                run = play(method, tmp_path)
            where = *place, liar.told
            assert (run.folder / "summary.json").exists(), where
            assert sum(one["accepted"] for one in run.rounds) > 0, where
            recorded = [(one["train"], one["evaluate"], one["central"]) for one in run.rounds]
            assert all(map(math.isfinite, numbers([list(one) for one in recorded]))), where
            # A lie within what a metric may be is a lie like any other; a monitor's look is no reply of a
            # round.
            if name == "metrics" and kind != "query.monitor":
                for lie, number in liar.told.items():
                    refused = {one["round"]: sum(one["rejected"].values()) for one in run.rounds}
                    assert refused[number] or (key != "num-examples" and lie in ("minus", "2**62")), where
            assert len(lies) < left, "the node has no reply there"
