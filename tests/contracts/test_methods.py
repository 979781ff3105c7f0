"""What every method and baseline must satisfy, whatever its paper says."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Error, RecordDict
from tests.contracts.plays import (
    METHODS,
    VARIANTS,
    Interrupted,
    Method,
    Passed,
    Played,
    interrupted,
    passing,
    play,
    read,
)

from hedgerow.clients import BatchClientApp
from hedgerow.sim import read_config
from hedgerow.strategies import TooFewRepliesError
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, payload_bytes, view


def _each(methods: Iterable[Method]) -> pytest.MarkDecorator:
    # A method's tests share the run that nothing disturbs, and so the process.
    rows = [pytest.param(method, marks=pytest.mark.xdist_group(str(method))) for method in methods]
    return pytest.mark.parametrize("method", rows, ids=str)


every_method = _each(METHODS)
every_variant = _each([*METHODS, *VARIANTS])
# Of methods whose nodes meet when they decide, a round is an event: it is never made again.
every_repeating_method = _each(method for method in METHODS if method.case.repeats)

# What is booked nowhere: introductions, looks of the monitor, which a real run cannot take, and evaluation by
# nodes, which the papers do not count.
UNBOOKED = ("query.whoami", "query.pair", "query.monitor", "evaluate")


@dataclass(frozen=True)
class Plain:
    """A run that nothing disturbs: what it left, what passed, and the global generators before and after."""

    run: Played
    passed: Sequence[Passed]
    generators: tuple[Any, Any]


MakePlain = Callable[[Method], Plain]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> MakePlain:
    """Returns a method's run that nothing disturbs, made once."""

    @cache
    def made(name: str) -> Plain:
        method = next(one for one in (*METHODS, *VARIANTS) if str(one) == name)
        with passing() as passed:
            run = play(method, tmp_path_factory.mktemp("plain"), **{"checkpoint-every": 1})
        after = _generators()
        _seed(read_config(run.folder)["run"]["seed"])
        return Plain(run, passed, (_generators(), after))

    return lambda method: made(str(method))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def _generators() -> tuple[Any, ...]:
    numpys = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    return random.getstate(), numpys, torch.get_rng_state().tolist()


@every_method
def test_a_run_leaves_a_folder_that_says_what_it_was_of(method: Method, plain: MakePlain) -> None:
    case, run = method.case, plain(method).run
    assert {"config.json", "rounds.jsonl", "summary.json"} <= {path.name for path in run.folder.iterdir()}
    assert not list(run.folder.rglob("*.partial"))
    config = read_config(run.folder)
    named = case.named(method.name)
    asked = {**case.defaults, **case.small, **named, "quiet": True, "checkpoint-every": 1}
    assert (config["app"], config["run"]) == (case.name, {**asked, "output-dir": str(run.folder.parent)})
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["status"], summary["lost-replies"]) == ("completed", {})
    last = run.rounds[-1]["round"]
    assert summary["last"]["round"] == last == case.rounds.get(method.name, last)
    # Of CEPS and its baselines models stay on the nodes.
    assert bool(run.model) == (case.name != "ceps")


@every_method
def test_another_seed_gives_another_run(method: Method, plain: MakePlain, tmp_path: Path) -> None:
    with interrupted(after=1), pytest.raises(Interrupted):
        play(method, tmp_path, seed=5)
    (folder,) = tmp_path.iterdir()
    measured = [one["central"] for one in read(folder).rounds]
    assert measured != [one["central"] for one in plain(method).run.rounds[: len(measured)]]


@every_variant
def test_serialised_messages_change_nothing(method: Method, plain: MakePlain, tmp_path: Path) -> None:
    assert play(method, tmp_path, strict=True).all == plain(method).run.all


@every_method
def test_nodes_that_are_called_one_by_one_change_nothing(
    method: Method, plain: MakePlain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchClientApp, "batch_handler", lambda self, message_type: None)
    assert play(method, tmp_path).all == plain(method).run.all


# Of methods that make a round again, a failed round stops a run further down.
@_each([*(method for method in METHODS if not method.case.repeats), *VARIANTS])
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_is_not(
    method: Method, plain: MakePlain, tmp_path: Path
) -> None:
    """And a seed gives the same bits twice."""
    with interrupted(after=1), pytest.raises(Interrupted):
        play(method, tmp_path, **{"checkpoint-every": 1})
    (folder,) = tmp_path.iterdir()
    resumed = play(method, tmp_path, resume=folder)
    assert resumed.learnt == plain(method).run.learnt
    # Members of secure sums draw new keys, which cost bytes.
    if "secure-sum" not in method.changes:
        assert resumed.all == plain(method).run.all


_NETWORK = {"ceps": {"problem": "network", "partition": "iid", "measurements": 400}}
DRAWING = [
    Method(
        method.case,
        method.name,
        {
            "model": f"tests.contracts.drawing:{'split' if method.case.name == 'hsgd' else 'build'}",
            **({"ratio": 0.5} if method.case.name == "fedmud" else {}),
            **_NETWORK.get(method.case.name, {}),
        },
    )
    for method in METHODS
]


@_each(DRAWING)
def test_a_model_that_draws_repeats_in_any_company_and_after_a_kill(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run begins with other generators, calls node by node, and is killed once."""
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()
    expected, generators = play(method, tmp_path / "first"), _generators()
    _seed(1)
    monkeypatch.setattr(BatchClientApp, "batch_handler", lambda self, message_type: None)
    with interrupted(after=1), pytest.raises(Interrupted):
        play(method, tmp_path / "again", **{"checkpoint-every": 1})
    (folder,) = (tmp_path / "again").iterdir()
    assert play(method, tmp_path / "again", resume=folder).all == expected.all
    # A run seeds the global generators; its nodes leave them as they were.
    assert _generators() == generators


@every_method
def test_a_run_with_faults_is_resumed_with_the_same_faults(method: Method, tmp_path: Path) -> None:
    faults = {
        "fault-dropout": 0.2, "fault-delay": "exponential:1", "round-timeout": 4.0, "min-replies": 1,
        "checkpoint-every": 1,
    }  # fmt: skip
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = play(method, tmp_path / "whole", **faults)
    assert any(record["rejected"] for record in whole.rounds)
    with interrupted(after=1), pytest.raises(Interrupted):
        play(method, tmp_path / "parts", **faults)
    (folder,) = (tmp_path / "parts").iterdir()
    assert play(method, tmp_path / "parts", resume=folder, **faults).learnt == whole.learnt


@every_method
def test_the_global_random_generators_are_seeded_and_not_drawn_from(method: Method, plain: MakePlain) -> None:
    before, after = plain(method).generators
    assert before == after


def round_of(passed: Passed) -> int:
    """Return the round that an instruction is of."""
    return int(passed.instruction.metadata.group_id.partition("-")[0] or 0)


def trains(passed: Passed) -> bool:
    return passed.kind.partition(".")[0] == "train"


def lost(passed: Passed) -> Error:
    return Error(0, "lost on the way")


class FirstTry:
    """Loses all training replies of a round's first try, once nodes have done what they were asked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: tuple[Any, ...] | None = None
        self.lost = 0
        self.over = False

    def __call__(self, passed: Passed) -> Error | None:
        if self.over or not trains(passed) or round_of(passed) != self.number:
            return None
        told = passed.kind, passed.partition, dict(passed.instruction.content["config"])
        # Who is told what it was told first is in a second try.
        self.over = told == self.first
        self.first = self.first or told
        self.lost += not self.over
        return None if self.over else lost(passed)


@every_repeating_method
def test_a_round_that_is_made_again_ends_as_one_that_is_not(
    method: Method, plain: MakePlain, tmp_path: Path
) -> None:
    first_try = FirstTry(2)
    with passing(first_try):
        again = play(method, tmp_path)
    assert again.learnt == plain(method).run.learnt
    assert sum(again.rounds[2]["rejected"].values()) == first_try.lost > 0


@every_repeating_method
def test_a_round_that_never_succeeds_ends_the_run_which_goes_on_from_its_checkpoint(
    method: Method, plain: MakePlain, tmp_path: Path
) -> None:
    def lose(passed: Passed) -> Error | None:
        return lost(passed) if trains(passed) and round_of(passed) == 2 else None

    with passing(lose), pytest.raises(TooFewRepliesError, match="Round 2: 0 valid replies of"):
        play(method, tmp_path, **{"checkpoint-every": 1})
    (folder,) = tmp_path.iterdir()
    assert play(method, tmp_path, resume=folder).all == plain(method).run.all


def payload(content: RecordDict) -> str:
    """Return the name of the record that matters in a reply: its arrays, or the bytes for other nodes."""

    def has_bytes(record: ConfigRecord) -> bool:
        return any(
            isinstance(one, bytes) for v in record.values() for one in (v if isinstance(v, list) else [v])
        )

    sealed = [name for name, record in content.config_records.items() if has_bytes(record)]
    return next(iter([*content.array_records, *sealed]), "")


def _nan(content: RecordDict, name: str) -> None:
    record = content[name]
    for key, value in record.items():
        nan = (
            np.full_like(view(value), np.nan, dtype=np.float32) if isinstance(value, Array) else float("nan")
        )
        record[key] = Array(nan) if isinstance(value, Array) else nan


def _shape(content: RecordDict, name: str) -> None:
    record = content[name]
    for key, value in record.items():
        record[key] = Array(np.zeros((3, 1, 2), view(value).dtype)) if isinstance(value, Array) else 0.5


def _renamed(content: RecordDict, name: str) -> None:
    record = content[name]
    key = next(iter(record))
    record[f"{key}-of-mine"] = record.pop(key)


# Every record of every reply of every app is spoilt in more ways in tests/flower_apps/test_fuzz_apps.py.
GARBAGE = {"nan": _nan, "shape": _shape, "renamed": _renamed}


class SomeReplies:
    """Spoils the first replies of a round whose arrays, or sealed bytes, the method works with: one each."""

    def __init__(self, number: int, spoil: Sequence[Callable[[RecordDict, str], None] | None]) -> None:
        self.number = number
        self.left = list(spoil)

    def __call__(self, passed: Passed) -> RecordDict | Error | None:
        if not self.left or passed.kind in UNBOOKED or round_of(passed) != self.number:
            return None
        if not passed.reply.has_content() or not (name := payload(passed.reply.content)):
            return None
        if (spoil := self.left.pop(0)) is None:
            return lost(passed)
        content = RecordDict({each: record.copy() for each, record in passed.reply.content.items()})
        spoil(content, name)
        return content


def losses(played: Played) -> list[float]:
    """Return what was lost in each round: replies to the server, and messages between nodes."""
    return [sum(r["rejected"].values()) + r["train"].get("lost-payloads", 0) for r in played.rounds]


@every_method
def test_garbage_costs_what_a_lost_reply_costs(method: Method, tmp_path: Path) -> None:
    """All kinds of it in one round, each from another node."""

    def run(name: str, *spoil: Callable[[RecordDict, str], None] | None) -> Played:
        (tmp_path / name).mkdir()
        with passing(spoilt := SomeReplies(2, spoil)):
            played = play(method, tmp_path / name, **{"min-replies": 1})
        assert not spoilt.left
        return played

    expected = run("lost", *(None for _ in GARBAGE))
    assert sum(losses(expected)) > 0
    played = run("garbage", *GARBAGE.values())
    assert played.learnt == expected.learnt
    assert losses(played) == losses(expected)


def instruction_bytes(passed: Passed) -> int:
    """Return the bytes of an instruction, without the introductions that ride on HSGD's first ones."""
    content = passed.instruction.content
    riding = {"introductions"} if passed.kind == "train.exchange" else set()
    return payload_bytes(RecordDict({name: one for name, one in content.items() if name not in riding}))


@every_method
def test_the_ledger_is_the_bytes_of_the_messages(method: Method, plain: MakePlain) -> None:
    undisturbed = plain(method)
    links = undisturbed.run.rounds[-1]["by_link"]
    booked = [one for one in undisturbed.passed if one.kind not in UNBOOKED]
    for link, sizes in (
        (HUB_TO_NODE, [instruction_bytes(one) for one in booked]),
        (NODE_TO_HUB, [payload_bytes(one.reply.content) for one in booked]),
    ):
        assert (link, links[link]["messages"], links[link]["payload_bytes"]) == (link, len(sizes), sum(sizes))
