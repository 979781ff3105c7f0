"""Attacks of a hostile server on a node: each succeeds on a simulated node, and fails on a guarded one."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from tests.clients import contexts
from tests.clients.ceps.federation import squares

import hedgerow.clients.policy
from ceps.client_app import app as ceps_app
from hedgerow.clients import (
    BatchClientApp,
    Refusal,
    ceps_client,
    each,
    gaussian_variance,
    noised,
    privacy_of,
    sd_feel_client,
)
from hedgerow.clients.mods.guard import (
    FAILED,
    NO_MESSAGE,
    NO_MONITOR,
    NO_POLICY,
    SPENT,
    TOO_OFTEN,
    UNPROTECTED,
)
from hedgerow.clients.policy import POLICY_VARIABLE, Policy, PolicyError, policy_of, read_policy
from hedgerow.clients.releases import Releases, ReleasesError, Spent, TooOften, epsilon_of
from hedgerow.strategies import Privacy
from hedgerow.wire import (
    HELLO,
    LINKS_RECORD,
    MONITOR,
    NODE_RECORD,
    PUBLISH,
    RESTORE,
    SEALED_RECORD,
    SECRET_RECORD,
    STATE,
    UPDATE,
    WHOAMI,
    Call,
    parse_codec,
    process,
    to_record,
    view,
)

Array = npt.NDArray[np.float64]

N, RECORDS = 60, 30
PROBLEM = squares(5, 1, N, 4, RECORDS)[0]
SETTINGS: Mapping[str, Any] = {
    "method": "ceps",
    "run-seed": 3,
    "num-nodes": 2,
    "neighbours": [1],
    "s": N,
    "codec": "dense64",
    "r": 1.0,
    "kappa-low": 1,
    "kappa-high": 1,
    "mu": 0.1,
    "sigma-rule": "fixed_c",
    "c": 2.0,
    "privacy": "sound",
    "epsilon": 0.5,
    "delta": 1e-5,
    "clip": 1.0,
}
SIGMA = gaussian_variance(0.5, 1e-5, 2 / RECORDS) ** 0.5
LEARN: Mapping[str, Any] = {
    "dataset": "mnist-5k",
    "partition": "iid",
    "num-clients": 2,
    "model": "logistic",
    "seed": 0,
    "data-dir": "",
}


def node(run_id: int = 1, run_config: Mapping[str, Any] | None = None, **node_config: Any) -> Context:
    return contexts.context(0, run_id, run_config=run_config, **node_config)


def policy(folder: Path, text: str) -> str:
    (folder / "hedgerow-node.toml").write_text(text)
    return str(folder / "hedgerow-node.toml")


def told(
    app: BatchClientApp, kind: str, content: Mapping[str, Any], context: Context
) -> RecordDict | Exception:
    return contexts.answer(app, kind, context, RecordDict({**content}))


def refused(answer: RecordDict | Exception) -> str:
    assert isinstance(answer, Refusal), answer
    return str(answer)


def answered(answer: RecordDict | Exception) -> RecordDict:
    if isinstance(answer, Exception):
        raise answer
    return answer


def introduce(**run_config: Any) -> tuple[BatchClientApp, Context]:
    return sd_feel_client(), node(run_config={**LEARN, **run_config})


# Import paths and files


def folder_deleter(at: Path) -> tuple[dict[str, Any], Callable[[], bool]]:
    victim = at / "victim"
    victim.mkdir()
    (victim / "records.csv").write_text("1,2")
    return {"dataset": "shutil:rmtree", "data-dir": str(victim)}, lambda: not victim.exists()


def program_starter(at: Path) -> tuple[dict[str, Any], Callable[[], bool]]:
    program, mark = at / "program", at / "started"
    program.write_text(f"#!/bin/sh\n: > '{mark}'\n")
    program.chmod(0o700)
    return {"dataset": "subprocess:call", "data-dir": str(program)}, mark.exists


class _Pickled:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def unpickler(at: Path) -> tuple[dict[str, Any], Callable[[], bool]]:
    file, mark = at / "file.pickle", at / "unpickled"
    file.write_bytes(pickle.dumps(_Pickled(mark)))
    return {"dataset": "pandas:read_pickle", "data-dir": str(file)}, mark.exists


def importer(at: Path) -> tuple[dict[str, Any], Callable[[], bool]]:
    mark = at / "imported"
    (at / "imported_by_a_server.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    return {"model": "imported_by_a_server:build"}, mark.exists


ATTACKS = (folder_deleter, program_starter, unpickler, importer)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("imported_by_a_server", None)
    return tmp_path


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_config_reaches_code_of_a_simulated_node(attack: Any, importable: Path) -> None:
    run_config, done = attack(importable)
    told(*_question(run_config))
    assert done()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_config_reaches_no_code_of_a_device(attack: Any, importable: Path, device: Path) -> None:
    run_config, done = attack(importable)
    # Not even where the folder is the owner's own, which a run may read.
    for own in ({}, {"data-dir": run_config.get("data-dir", "")}):
        app, kind, content, context = _question(run_config)
        context.node_config.update(own)
        reason = refused(told(app, kind, content, context))
        assert not done()
        assert str(device) not in reason


def _question(run_config: dict[str, Any]) -> tuple[BatchClientApp, str, dict[str, Any], Context]:
    app, context = introduce(**run_config)
    return app, WHOAMI, {}, context


def test_an_import_path_that_the_owner_allows_is_used(importable: Path, device: Path) -> None:
    (importable / "owners_data.py").write_text(
        "import numpy as np\nfrom hedgerow.tasks import Dataset\n"
        "def load(folder):\n    x, y = np.ones((6, 3), np.float32), np.arange(6) % 2\n"
        "    return Dataset('mine', x, y, x, y, num_classes=2)\n"
    )
    allowed = {"policy": policy(device, 'imports = ["owners_data:load"]')}
    for own in (allowed, {"allow-imports": "other:thing, owners_data:load"}):
        app, kind, content, context = _question({"dataset": "owners_data:load"})
        context.node_config.update(own)
        assert answered(told(app, kind, content, context))["whoami"]["num-examples"] == 3
    assert "dataset" in refused(told(*_question({"dataset": "owners_data:np"})))


SECRET = "root:x:31337:hunter2"


def libsvm(path: Path, **more: Any) -> tuple[BatchClientApp, str, dict[str, Any], Context]:
    run_config = {
        "problem": "logistic",
        **{
            key: 0
            for key in ("features", "sparsity", "noise", "samples-low", "samples-high", "class-0", "class-1")
        },
        **LEARN,
        "l2": 0.1,
        "libsvm": str(path),
        **more,
    }
    return ceps_app, WHOAMI, {}, node(run_config=run_config)


def test_the_first_bytes_of_a_file_travel_back_from_a_simulated_node(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text(SECRET)
    answer = told(*libsvm(tmp_path / "shadow"))
    assert isinstance(answer, ValueError)
    assert "root" in str(answer)


@pytest.mark.parametrize("allowed", [False, True])
def test_no_byte_of_a_file_travels_back_from_a_device(allowed: bool, device: Path) -> None:
    (device / "data").mkdir()
    (device / "shadow").write_text(SECRET)
    question = libsvm(device / "shadow")
    if allowed:  # Its owner lets a run read it: what is wrong with it is still told to nobody.
        question[-1].node_config["policy"] = policy(device, f'folders = ["{device}"]')
    reason = refused(told(*question))
    assert reason == (
        FAILED if allowed else "libsvm: the file or folder is none that this node lets a run name"
    )


def test_no_path_leads_out_of_a_folder_that_may_be_read_and_whether_a_file_is_there_is_not_told(
    device: Path,
) -> None:
    (device / "data").mkdir()
    (device / "shadow").write_text(SECRET)
    (device / "data" / "link").symlink_to(device / "shadow")
    for named in ("../shadow", "link"):
        app, kind, content, context = libsvm(Path(named))
        context.node_config["data-dir"] = str(device / "data")
        assert refused(told(app, kind, content, context)).startswith("libsvm: ")
    assert len({refused(told(*libsvm(device / name))) for name in ("shadow", "away", "away/deeper")}) == 1


def test_keys_of_a_server_fish_for_no_words_of_an_error(device: Path) -> None:
    def fail(call: Call) -> RecordDict:
        raise ValueError(f"{SECRET} is wrong")

    words = {key: 1 for key in SECRET.split(":")}
    answer = told(
        BatchClientApp({"train": each(fail)}), "train", {"c": ConfigRecord({**words})}, node(1, words)
    )
    assert refused(answer) == FAILED


# What a message may take


def test_a_message_that_takes_too_long_is_ended(device: Path) -> None:
    app = BatchClientApp({"train": each(lambda call: sleep(30) or RecordDict())})
    context = node(policy=policy(device, "max-seconds = 0.05"))
    assert refused(told(app, "train", {}, context)) == "the message took longer than this node gives one"


GREEDY = """
import json, resource, sys
import numpy as np, torch
from flwr.app import Context, RecordDict
from hedgerow.clients import BatchClientApp, each
from hedgerow.wire import Call
from hedgerow.wire.process import simulated

def take(call):
    size = int(call.context.node_config["take"])
    taken = np.ones(size, np.uint8) if call.context.node_config["by"] == "numpy" else torch.ones(size).sum()
    return RecordDict()

def ask(size, by):
    own = Context(1, 77, {"policy": sys.argv[1], "take": size, "by": by}, RecordDict(), {})
    handler = BatchClientApp({"train": each(take)}).batch_handler("train")
    (answer,) = handler([Call(RecordDict(), own, "train")])
    answers.append("" if isinstance(answer, RecordDict) else str(answer))

before, answers = resource.getrlimit(resource.RLIMIT_DATA), []
for by, size in (("numpy", 2**20), ("numpy", 2**31), ("torch", 2**29), ("numpy", 2**20)):
    ask(size, by)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
with simulated():
    ask(2**28, "numpy")
assert np.ones(2**28, np.uint8)[-1]
print(json.dumps(answers))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has the limit")
def test_a_message_that_takes_too_much_memory_is_refused_and_the_limit_goes_with_it(device: Path) -> None:
    rules = policy(device, f"max-memory = {2**27}")
    asked = [sys.executable, "-c", GREEDY, rules]
    root = Path(__file__).parents[2]
    found = subprocess.run(asked, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    much = "the message took more memory than this node gives one"
    assert json.loads(found.stdout.splitlines()[-1]) == ["", much, much, "", ""]
    # What was asked for is in the node's own log, and there alone.
    assert "Unable to allocate" in found.stderr
    assert found.stderr.count("has no effect in a simulation") == 1


def test_where_no_memory_can_be_limited_a_policy_that_wants_it_is_not_valid(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedgerow.clients.policy, "can_limit_memory", lambda: False)
    with pytest.raises(PolicyError, match="max-memory must be left out, got 5"):
        read_policy(Path(policy(device, "max-memory = 5")))


def test_a_message_that_is_too_large_or_not_listed_by_the_owner_is_not_handled(device: Path) -> None:
    ran: list[str] = []
    answer = each(lambda call: ran.append(call.message_type) or RecordDict())  # type: ignore[func-returns-value]
    app = BatchClientApp({"train": answer, "evaluate": answer})
    context = node(policy=policy(device, 'messages = ["train"]\nmax-bytes = 1000'))
    answered(told(app, "train", {}, context))
    assert refused(told(app, "evaluate", {}, context)) == NO_MESSAGE
    assert refused(told(app, STATE, {}, context)) == NO_MESSAGE
    large = {"arrays": to_record({"x": np.zeros(200)})}
    assert refused(told(app, "train", large, context)) == "the message is larger than this node takes"
    assert ran == ["train"]


@pytest.mark.usefixtures("flower_identity")
def test_the_guard_stands_where_flower_calls_the_app(device: Path) -> None:
    app, context = introduce(dataset="shutil:rmtree")
    with pytest.raises(Refusal, match="dataset: the import path is none that this node allows"):
        app(Message(RecordDict(), 1, WHOAMI), context)


# CEPS


def hello(context: Context, **changes: Any) -> RecordDict | Exception:
    config = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    return told(APP, HELLO, {"config": ConfigRecord(config)}, context)


APP = ceps_client(lambda _: PROBLEM)
SOUND = 'privacy = "sound"\n'


def published(context: Context, k: int) -> Array:
    answer = answered(told(APP, PUBLISH, {"config": ConfigRecord({"iteration": k})}, context))
    payload = answer["payload"]["bytes"]
    decoded = parse_codec("dense64").decode(payload, N, (0,))  # type: ignore[arg-type]
    assert decoded is not None
    return decoded


def update(context: Context, k: int, z: Array, **config: Any) -> RecordDict | Exception:
    bundle = ConfigRecord({"1": parse_codec("dense64").encode(z, (0,))})
    return told(APP, UPDATE, {"config": ConfigRecord({"iteration": k, **config}), "bundle": bundle}, context)


def averaged(context: Context, hellos: int) -> tuple[Array, int]:
    """Return the mean of the gradients at 0 as a server reads them after so many hellos, and their number."""
    read = []
    for i in range(hellos):
        answer = hello(context, **{"run-seed": i})
        if isinstance(answer, Refusal):
            assert str(answer) == TOO_OFTEN
            continue
        # w^1 = u / (c + mu), and u = noise - gradient.
        read.append(-published(context, 1) * (SETTINGS["c"] + SETTINGS["mu"]))
    return np.mean(read, axis=0), len(read)


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def test_repeated_hellos_average_the_noise_of_a_simulated_node_away_and_little_of_a_devices(
    device: Path,
) -> None:
    exact = PROBLEM.gradient(np.zeros(N), 1.0)
    with process.simulated():
        found, count = averaged(node(), 400)
    assert count == 400
    assert rms(found - exact) < SIGMA / 10
    found, count = averaged(node(policy=policy(device, SOUND)), 400)
    assert count == Policy().max_hellos == 4
    assert rms(found - exact) > SIGMA / 4


def test_hellos_are_counted_over_restarts_of_the_node(device: Path) -> None:
    rules = policy(device, SOUND + "max-hellos = 2")
    for seed in range(2):  # Each with a state of its own, as after a restart.
        answered(hello(node(policy=rules), **{"run-seed": seed}))
    assert refused(hello(node(policy=rules), **{"run-seed": 2})) == TOO_OFTEN


def ask_monitor(context: Context, w: Array) -> RecordDict | Exception:
    content = {"config": ConfigRecord({"iteration": 1}), "arrays": to_record({"w": w})}
    return told(APP, MONITOR, content, context)


def test_the_monitor_of_a_simulated_node_tells_its_exact_gradient() -> None:
    context = node()
    answered(hello(context))

    def f(w: Array) -> float:
        return float(answered(ask_monitor(context, w))["metrics"]["mean-objective"])  # type: ignore[arg-type]

    # Exact for a quadratic.
    found = np.array([(f(e) - f(-e)) / 2 for e in np.eye(N)])
    np.testing.assert_allclose(found, PROBLEM.gradient(np.zeros(N)), atol=1e-12)


@pytest.mark.parametrize("text", ["", SOUND, "monitor = true"])
def test_the_monitor_of_a_device_tells_nothing_in_mode_sound(text: str, device: Path) -> None:
    context = node(policy=policy(device, text))
    answered(hello(context))
    assert refused(ask_monitor(context, np.zeros(N))) == NO_MONITOR


def test_a_device_shows_its_model_only_where_its_owner_lets_it(device: Path) -> None:
    for text, shown in (("", False), ("monitor = true", True)):
        context = node(policy=policy(device, text))
        answered(hello(context, privacy="none"))
        assert isinstance(ask_monitor(context, np.zeros(N)), RecordDict) == shown
        metrics = answered(update(context, 1, np.zeros(N), monitor=True))["metrics"]
        assert ("objective" in metrics) == shown


def gradient_by_restore(context: Context) -> Array:
    """Return a gradient that a server reads by telling a node that its noise was never asked for."""
    answered(hello(context))
    state = answered(told(APP, STATE, {}, context))
    state["ceps-config"] = ConfigRecord({**state["ceps-config"], "privacy": "none"})  # type: ignore[arg-type]
    answered(told(APP, RESTORE, state, context))
    answered(update(context, 1, np.zeros(N)))
    # The update's w is u / c, and u = c mean - gradient.
    w = view(context.state.array_records["ceps"]["w"])
    mean = view(state["ceps"]["u"]) / (SETTINGS["c"] + SETTINGS["mu"]) / 2  # type: ignore[arg-type]
    found: Array = SETTINGS["c"] * (mean - w)
    return found - PROBLEM.gradient(mean)


def test_a_forced_restore_takes_the_noise_off_a_simulated_node() -> None:
    assert rms(gradient_by_restore(node())) < 1e-9


def test_a_device_takes_back_nothing_but_what_it_locked(device: Path) -> None:
    context = node(policy=policy(device, SOUND))
    answered(hello(context))
    locked = answered(told(APP, STATE, {}, context))
    assert set(locked) == {SEALED_RECORD, NODE_RECORD}
    before = {name: dict(record) for name, record in context.state.items()}
    # A state that the server made up.
    forged = RecordDict({key: record for key, record in context.state.items() if key != SECRET_RECORD})
    forged["ceps-config"] = ConfigRecord({**forged["ceps-config"], "privacy": "none"})  # type: ignore[arg-type]
    forged[NODE_RECORD] = ConfigRecord({"partition-id": 0, "run": "1"})
    number = {**locked[SEALED_RECORD], "number": 2}
    for made_up in (forged, {**locked, SEALED_RECORD: ConfigRecord({**number})}):
        assert refused(told(APP, RESTORE, {**made_up}, context)) == FAILED
        assert {name: dict(record) for name, record in context.state.items()} == before
    assert np.any(update(context, 1, np.zeros(N))["metrics"]["gradients"])  # type: ignore[index]


def test_restores_are_counted_and_no_state_is_restored_after_a_later_one_of_its_run(device: Path) -> None:
    path = policy(device, "max-restores = 1")
    own = node(1, policy=path)
    first, second = (answered(told(APP, STATE, {}, own)) for _ in range(2))
    context = node(2, policy=path)
    answered(told(APP, RESTORE, first, context))
    assert refused(told(APP, RESTORE, first, context)) == TOO_OFTEN
    # Of each run: an honest one has a new id when it is resumed.
    answered(told(APP, RESTORE, second, node(3, policy=path)))
    assert refused(told(APP, RESTORE, first, node(4, policy=path))) == TOO_OFTEN


def test_what_a_run_has_established_outlives_a_restore(device: Path) -> None:
    path = policy(device, "")
    earlier = answered(told(APP, STATE, {}, node(1, policy=path)))
    context = node(2, policy=path)
    answered(hello(context, sealed=True, privacy="none"))
    kept = {name: dict(context.state[name]) for name in (LINKS_RECORD, SECRET_RECORD)}
    answered(told(APP, RESTORE, earlier, context))
    assert {name: dict(context.state[name]) for name in (LINKS_RECORD, SECRET_RECORD)} == kept


def two_updates(first: Context) -> tuple[Context, Context]:
    """Return two contexts of one node and moment, as two messages at work at once would have."""
    answered(hello(first))
    return first, Context(first.run_id, first.node_id, first.node_config, RecordDict({**first.state}), {})


def test_one_noise_on_two_gradients_gives_their_difference_away_at_a_simulated_node() -> None:
    a, b = two_updates(node())
    # w^1 is u / (c + mu), and u after the update is c mean - gradient + noise.
    own = view(a.state.array_records["ceps"]["u"]) / (SETTINGS["c"] + SETTINGS["mu"])
    means = []
    for context, z in ((a, np.zeros(N)), (b, np.linspace(-1, 1, N))):
        answered(update(context, 1, z))
        means.append((own + z) / 2)
    u_a, u_b = (view(context.state.array_records["ceps"]["u"]) for context in (a, b))
    found = SETTINGS["c"] * (means[1] - means[0]) - (u_b - u_a)
    exact = PROBLEM.gradient(means[1], 1.0) - PROBLEM.gradient(means[0], 1.0)
    assert rms(found - exact) < 1e-6 * SIGMA


def test_no_noise_of_a_device_is_on_two_gradients(device: Path) -> None:
    a, b = two_updates(node(policy=policy(device, SOUND)))
    answered(update(a, 1, np.zeros(N)))
    assert refused(update(b, 1, np.ones(N))) == TOO_OFTEN


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ({"privacy": "none"}, "privacy"),
        ({"privacy": "paper", "sens": 0.1}, "privacy"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"delta": 1 - 1e-9}, "epsilon"),
        ({"clip": 1e6}, "clip"),
    ],
)
def test_a_server_orders_weaker_privacy_of_a_simulated_node_alone(
    order: dict[str, Any], key: str, device: Path
) -> None:
    rules = policy(device, SOUND + "max-epsilon-per-release = 1.0\nmax-clip = 5.0")
    assert refused(hello(node(policy=rules), **order)).startswith(f"{key}: ")
    answered(hello(node(policy=rules)))
    with process.simulated():
        answered(hello(node(), **order))


def test_the_least_noise_is_the_owners(device: Path) -> None:
    multiplier = Privacy("sound", 0.5, 1e-5).noise_multiplier
    for least, kept in ((0.999, True), (1.001, False)):
        rules = policy(device, SOUND + f"min-noise-multiplier = {least * multiplier}")
        assert isinstance(hello(node(policy=rules)), RecordDict) == kept


def gradient_by_seed(context: Context) -> float:
    """Return how far a server is from the gradient that knows the seed and takes its noise off."""
    answered(hello(context, **{"noise-source": "seed"}))
    own = noised(3, 0, 0, np.zeros(N), privacy_of(ConfigRecord({**SETTINGS}), PROBLEM.num_examples))
    read = published(context, 1) * (SETTINGS["c"] + SETTINGS["mu"]) - own
    return rms(read + PROBLEM.gradient(np.zeros(N), 1.0))


def test_the_seed_takes_the_noise_off_a_simulated_node_alone(device: Path) -> None:
    with process.simulated():
        assert gradient_by_seed(node()) < 1e-6 * SIGMA
    assert gradient_by_seed(node()) > SIGMA / 2
    assert gradient_by_seed(node(2, policy=policy(device, 'noise-source = "seed"'))) < 1e-6 * SIGMA


def test_what_no_noise_is_on_is_not_told_where_the_owner_wants_noise(device: Path) -> None:
    app = BatchClientApp({"evaluate": each(lambda _: RecordDict({"metrics": MetricRecord({"loss": 1.0})}))})
    reason = refused(told(app, "evaluate", {}, node(policy=policy(device, SOUND))))
    assert reason == f"privacy: {UNPROTECTED}"
    answered(told(app, "evaluate", {}, node(policy=policy(device, ""))))


# The ledger


def test_the_budget_ends_all_releases_over_restarts_and_runs(device: Path) -> None:
    """The releases that a run makes, resumed, restarted and begun again, and what they cost together."""
    step = Privacy("sound", 0.5, 1e-5)
    costs = [step.report(count, 1e-6).epsilon for count in range(1, 8)]
    rules = policy(device, SOUND + f"max-epsilon = {(costs[4] + costs[5]) / 2}\nledger = 'kept/ledger.jsonl'")
    ledger = Releases(device / "kept" / "ledger.jsonl")
    first = node(1, policy=rules)
    answered(hello(first))
    answered(update(first, 1, np.zeros(N)))
    restarted = node(1, policy=rules)  # Its state is gone.
    answered(hello(restarted))
    resumed = node(2, policy=rules)  # The run's id is another.
    resumed.state = RecordDict({**restarted.state})
    resumed.state["ceps-state"] = ConfigRecord({**resumed.state["ceps-state"], "run": "2"})  # type: ignore[arg-type]
    answered(update(resumed, 1, np.zeros(N)))
    assert spent(ledger) == pytest.approx(costs[3], rel=1e-9)
    another = node(3, policy=rules)
    answered(hello(another))
    assert refused(update(another, 1, np.zeros(N))) == SPENT
    assert refused(hello(node(4, policy=rules))) == SPENT
    assert spent(ledger) == pytest.approx(costs[4], rel=1e-9)


def test_a_communication_in_which_nobody_was_heard_spends_nothing(device: Path) -> None:
    rules = policy(device, SOUND + "ledger = 'ledger.jsonl'")
    context = node(policy=rules)
    answered(hello(context))
    before = spent(Releases(device / "ledger.jsonl"))
    content = {"config": ConfigRecord({"iteration": 1}), "bundle": ConfigRecord()}
    answered(told(APP, UPDATE, content, context))
    assert spent(Releases(device / "ledger.jsonl")) == before > 0


def test_a_simulation_keeps_no_ledger(device: Path) -> None:
    with process.simulated():
        answered(hello(node()))
    assert not (device / "home").exists()
    answered(hello(node()))
    assert (device / "home" / "hedgerow-ledger.jsonl").stat().st_mode & 0o777 == 0o600


def spent(ledger: Releases) -> float:
    """Return epsilon at 1e-6 of all releases that a ledger has."""
    lines = map(json.loads, ledger.path.read_text().splitlines())
    return epsilon_of([line["multiplier"] for line in lines if line["what"] == "release"], 1e-6)


def release(ledger: Releases, index: int, **changes: Any) -> None:
    values = {"root": 1, "multiplier": 5.0, "delta": 1e-6, "max_epsilon": 100.0, **changes}
    ledger.release("1", 7, index=index, **values)


def test_a_torn_last_line_was_never_acted_on_and_other_damage_ends_all_releases(tmp_path: Path) -> None:
    ledger = Releases(tmp_path / "ledger.jsonl")
    release(ledger, 0)
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:40])
    release(ledger, 1)
    first, second = map(json.loads, ledger.path.read_text().splitlines())
    assert first == json.loads(whole)
    assert first["epsilon"] < second["epsilon"] == pytest.approx(spent(ledger))
    assert second["rho"] == pytest.approx(1 / 50)
    ledger.path.write_bytes(b'{"what": "release"}\n' + ledger.path.read_bytes())
    with pytest.raises(ReleasesError, match="is damaged"):
        release(ledger, 2)


def test_a_release_that_is_refused_is_not_written_down(tmp_path: Path) -> None:
    ledger = Releases(tmp_path / "ledger.jsonl")
    release(ledger, 0)
    before = ledger.path.read_bytes()
    with pytest.raises(Spent, match="must be at most 1"):
        release(ledger, 1, max_epsilon=1.0)
    with pytest.raises(TooOften, match="noise of release 0"):
        release(ledger, 0)
    assert ledger.path.read_bytes() == before


def test_queries_of_a_state_do_not_grow_the_ledger(device: Path) -> None:
    context = node(policy=policy(device, "ledger = 'ledger.jsonl'"))
    numbers = [answered(told(APP, STATE, {}, context))[SEALED_RECORD]["number"] for _ in range(30)]
    assert numbers == list(range(1, 31))
    assert len((device / "ledger.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("only_appends", [False, True])
def test_a_unit_that_is_given_back_counts_no_more(
    only_appends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the owner lets the app's user only append; then its line stays."""

    def refuse(*paths: object) -> None:
        raise PermissionError("no file may be replaced")

    if only_appends:
        monkeypatch.setattr("hedgerow.clients.releases.os.replace", refuse)
    ledger = Releases(tmp_path / "ledger.jsonl")
    release(ledger, 0)
    ledger.open("1", 7, "train", 1)
    with pytest.raises(TooOften):
        ledger.open("1", 7, "train", 1)
    release(ledger, 1)
    ledger.give_back("1", 7)
    ledger.open("1", 7, "train", 1)
    assert [ledger.lock("1", 7) for _ in range(3)] == [1, 2, 3]
    kinds = [json.loads(line)["what"] for line in ledger.path.read_text().splitlines()]
    assert kinds == (
        ["release", "open", "release", "back", "open", "lock", "lock", "lock"]
        if only_appends
        else ["release", "release", "open", "lock"]
    )


def test_units_are_counted_right_by_processes_that_replace_the_ledger_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from hedgerow.clients.releases import Releases\n"
        "ledger = Releases(Path(sys.argv[1]))\n"
        "for _ in range(40):\n"
        "    ledger.open('1', 7, 'train', 99); ledger.lock('1', 7); ledger.give_back('1', 7)\n"
        "ledger.open('1', 7, 'train', 99)\n"
    )
    path = tmp_path / "ledger.jsonl"
    both = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    kinds = [json.loads(line)["what"] for line in path.read_text().splitlines()]
    assert sorted(kinds) == ["lock", "open", "open"]
    assert Releases(path).lock("1", 7) == 81


def test_runs_of_one_id_are_apart_in_simulations_and_a_resumed_one_is_linked(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for name in ("first/0", "second/0", ""):
        ledger, run = Releases(path, name), f"1@{name}" if name else "1"
        release(ledger, 0)
        with pytest.raises(TooOften):
            release(ledger, 0)
        ledger.summed(run, 7, 1)
        with pytest.raises(TooOften):
            ledger.summed(run, 7, 1)
    ledger = Releases(path, "third/0")
    assert ledger.made("2@third/0") == (0, 0)
    ledger.restore("2@third/0", 7, 1, "1", 0)
    assert ledger.made("2@third/0") == (3, 1)


def test_a_ledger_that_cannot_be_written_releases_nothing(device: Path) -> None:
    (device / "file").touch()
    answer = hello(node(policy=policy(device, SOUND + "ledger = 'file/ledger.jsonl'")))
    assert refused(answer) == "this node cannot write down what it releases, so it releases nothing"


# The policy file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-hellos = true", "max-hellos must be an integer >= 0, got True"),
        ("privacy = ", "must be a TOML file"),
    ],
)
def test_a_policy_that_is_not_valid_is_one_error_and_the_node_answers_nothing(
    text: str, words: str, device: Path
) -> None:
    path = policy(device, text)
    with pytest.raises(PolicyError, match=words):
        read_policy(Path(path))
    app = BatchClientApp({"train": each(lambda _: RecordDict())})
    for context in (node(policy=path), node(policy=str(device / "away.toml")), node(policy=3)):
        assert refused(told(app, "train", {}, context)) == NO_POLICY
        assert refused(told(app, STATE, {}, context)) == NO_POLICY


def test_the_example_is_valid_and_says_every_key() -> None:
    file = Path(__file__).parents[2] / "deploy" / "hedgerow-node.toml"
    found = read_policy(file)
    assert found.privacy == "sound"
    text = file.read_text()
    assert all(f"{key.replace('_', '-')} = " in text for key in Policy.__dataclass_fields__)


def test_a_policy_is_named_by_the_owner_alone(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = policy(device, "max-bytes = 5\nfolders = ['data']")
    assert policy_of(node(run_config={"policy": path})) == Policy()
    monkeypatch.setenv(POLICY_VARIABLE, path)
    assert policy_of(node()) == Policy(max_bytes=5, folders=(device / "data",))
    (device / "own.toml").write_text("max-bytes = 6")
    assert policy_of(node(policy=str(device / "own.toml"))) == Policy(max_bytes=6)


def test_a_simulated_node_has_a_policy_only_where_one_is_named(device: Path) -> None:
    with process.simulated():
        assert policy_of(node()) is None
        assert policy_of(node(policy=policy(device, ""))) == Policy()


@pytest.mark.parametrize(
    "claims",
    [
        {"simulated": True},
        {"partition-id": 0, "num-partitions": 2},
        {"engine": "inprocess"},
        {"engine": "flower"},
    ],
)
def test_no_config_makes_a_device_simulated(claims: dict[str, Any], device: Path) -> None:
    context = node(run_config=claims)
    context.node_config.update(claims)
    assert policy_of(context) == Policy()
