"""A node charges ``max-unprotected`` for what it did, whatever its handlers declare: all apps, all types."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.contexts import answer, context
from tests.clients.test_policies import APPS, COVERED, REQUIRED
from tests.contracts.plays import VARIANTS, Method, Passed, passing, play
from tests.flower_apps.cases import CASES, HSGD

from hedgerow.clients import BatchClientApp, Reveals, each, reveals
from hedgerow.clients.mods.guard import check_privacy, reveals_nothing, reveals_of
from hedgerow.clients.policy import POLICY_VARIABLE
from hedgerow.wire import MASKED_SUM, MONITOR, process, to_record
from hedgerow.wire.failures import RunFailedError

DECLARED = {
    (name, kind): reveals_of(handler) for name, app in APPS.items() for kind, handler in app._handlers.items()
}
NOTHING = {kind for kinds in COVERED[REQUIRED].values() for kind in kinds}


@contextmanager
def device() -> Iterator[Path]:
    """Take away what makes this process a simulation; the value is an empty folder."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_open", 0)
        patch.delenv(POLICY_VARIABLE, raising=False)
        yield Path(folder)


def policy(folder: Path, text: str, ledger: str = "ledger.jsonl") -> str:
    file = folder / "policy.toml"
    file.write_text(f"{text}\n" + (f'ledger = "{ledger}"\n' if ledger else ""))
    return str(file)


def charged(folder: Path) -> int:
    file = folder / "ledger.jsonl"
    kinds = [json.loads(line)["what"] for line in file.read_text().splitlines()] if file.exists() else []
    return kinds.count("open") - kinds.count("back")


# What a handler may do, beside what it declares.
ARRAYS = to_record({"w": np.ones(3)})


def bare() -> RecordDict:
    return RecordDict({"arrays": ARRAYS, "metrics": MetricRecord({"loss": 1.0})})


def fails() -> RecordDict:
    raise ValueError("what it finds in the records")


def noised() -> RecordDict:
    check_privacy("sound", 9.0, 1.0)
    return bare()


def next_to_no_noise() -> RecordDict:
    check_privacy("sound", 9.0, 1.0)
    check_privacy("sound", 1e-12, 1.0)
    return bare()


def noise_without_a_guarantee() -> RecordDict:
    check_privacy("paper", 9.0, 1.0)
    return bare()


def half_noised() -> RecordDict:
    check_privacy("sound", 9.0, 1.0)
    check_privacy("none")
    return bare()


def noised_mode_none() -> RecordDict:
    check_privacy("none")
    return bare()


def summed() -> RecordDict:
    return RecordDict({"masked": ArrayRecord({"masked": next(iter(ARRAYS.values()))})})


def summed_and_bare() -> RecordDict:
    return RecordDict({"masked": summed()["masked"], "arrays": ARRAYS})


def empty() -> RecordDict:
    return RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord()})


def nothing() -> RecordDict:
    reveals_nothing()
    return RecordDict({"metrics": MetricRecord({"num-examples": 3})})


ACTS = {
    act.__name__: act
    for act in (
        bare,
        fails,
        noised,
        next_to_no_noise,
        noise_without_a_guarantee,
        half_noised,
        noised_mode_none,
        summed,
        summed_and_bare,
        empty,
        nothing,
    )
}
FREE = {"noised", "empty", "nothing"}


def steps() -> st.SearchStrategy[list[tuple[tuple[str, str], str, bool]]]:
    one = st.tuples(st.sampled_from(sorted(DECLARED)), st.sampled_from(sorted(ACTS)), st.booleans())
    return st.lists(one, min_size=1, max_size=8)


@settings(deadline=None)  # the first epsilon imports SciPy
@given(steps(), st.integers(0, 3))
def test_what_is_answered_without_protection_is_charged_whatever_is_declared(
    told: list[tuple[tuple[str, str], str, bool]], most: int
) -> None:
    """A model counts the units; no more answers than units, and a unit for each answer and each failure."""
    with device() as folder:
        own, spent = context(policy=policy(folder, f"max-unprotected = {most}\nmonitor = true")), 0
        for (name, kind), act, masked in told:
            content = RecordDict({"config": ConfigRecord({"sums": True})})
            if masked:
                content[MASKED_SUM] = ConfigRecord()
            what = DECLARED[name, kind](content)
            app = BatchClientApp({kind: reveals(what, each(lambda call, act=act: ACTS[act]()))})
            said = answer(app, kind, own, content)
            safe = Reveals.NOISED in what or (Reveals.SUMMED in what and masked)
            protected = act in FREE or (act == "summed" and Reveals.SUMMED in what)
            if what is Reveals.NOTHING:
                assert isinstance(said, RecordDict) == (
                    act not in ("fails", "half_noised", "noised_mode_none")
                )
            elif spent < most:
                assert isinstance(said, RecordDict) == (act != "fails")
                spent += not protected
            else:
                # No unit is left: only what declares a protection runs, and only what has it leaves.
                assert isinstance(said, RecordDict) == (safe and protected)
                assert isinstance(said, RecordDict) or "as often as" in str(said)
            assert charged(folder) == spent


# Real runs: what passes, with a policy for all nodes.

NOISE = {"clip": 1.0, "noise-multiplier": 8.0, "upload-clip": 1.0, "upload-noise-multiplier": 8.0}
INTERVALS = {"global-interval": 2, "local-interval": 2, "noise-source": "seed"}
SUMMED = [one for one in VARIANTS if one.changes.get("secure-sum")]
SOUND = [one for one in VARIANTS if one.changes.get("privacy") == "sound"]
SOUND.append(Method(HSGD, "hsgd", {**NOISE, **INTERVALS, "sealed": False}))
OPEN = [Method(case, case.methods[0]) for case in CASES]
PARTLY = [Method(HSGD, "hsgd", {**INTERVALS, **dict(list(NOISE.items())[:2]), "sealed": False})]


def told(
    method: Method, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, ledger: str = "ledger.jsonl"
) -> list[Passed]:
    """Return what passed in a run of a method, until it ended; the monitor is refused."""
    monkeypatch.setenv(POLICY_VARIABLE, policy(folder, text, ledger))
    (folder / "runs").mkdir(exist_ok=True)
    with passing() as passed, suppress(RunFailedError):
        play(method, folder / "runs")
    return [one for one in passed if one.kind not in NOTHING | {MONITOR}]


def says_something(one: Passed) -> bool:
    """Return whether a reply is an error, or has more than a number of examples."""
    if one.reply.has_error():
        return True
    records = [record for record in one.reply.content.values() if record]
    return [set(record) for record in records] != [{"num-examples"}]


@pytest.mark.parametrize("method", OPEN, ids=str)
def test_a_run_without_protection_gets_no_more_answers_than_units(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in (0, 1):
        passed = told(method, tmp_path, f"max-unprotected = {most}", monkeypatch)
        answers = Counter(one.partition for one in passed if one.reply.has_content() and says_something(one))
        assert max(answers.values(), default=0) <= most
        assert any(one.reply.has_error() for one in passed)


@pytest.mark.parametrize("method", [*SUMMED, *SOUND], ids=str)
def test_a_protected_run_costs_no_unit_and_runs_again(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: simulations are apart, though their runs have one id, also in a ledger that the policy names."""
    kept = 'noise-source = "seed"'
    (tmp_path / "free").mkdir()
    free = told(method, tmp_path / "free", kept, monkeypatch)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    for ledger in ("ledger.jsonl", "ledger.jsonl", "", ""):
        passed = told(method, tmp_path, f"max-unprotected = 0\n{kept}", monkeypatch, ledger)
        assert len(passed) == len(free)
        assert not [one.reply.error.reason for one in passed if one.reply.has_error()]
    assert charged(tmp_path) == 0
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("method", PARTLY, ids=str)
def test_in_a_run_with_noise_on_encodings_alone_models_cost_units(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = told(method, tmp_path, 'max-unprotected = 0\nnoise-source = "seed"', monkeypatch)
    kinds = {(one.kind, one.reply.has_content()) for one in passed if says_something(one)}
    assert ("train.exchange", True) in kinds
    assert ("train.update", True) not in kinds
