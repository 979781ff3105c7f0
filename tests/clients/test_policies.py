"""Which messages a node answers under each policy: an allow-list, over all message types of all apps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from tests.clients import contexts
from tests.clients.ceps.federation import squares
from tests.clients.sums import Nodes

from hedgerow.clients import (
    BatchClientApp,
    Refusal,
    Reveals,
    ceps_client,
    each,
    fedmud_client,
    hsgd_client,
    masked_sum_handlers,
    reveals,
    sd_feel_client,
    similarity_free_client,
)
from hedgerow.clients.hsgd.own_data import own_party
from hedgerow.clients.mods.guard import UNPROTECTED, check_privacy
from hedgerow.clients.own_share import _held
from hedgerow.clients.releases import Releases
from hedgerow.tasks import build_model
from hedgerow.wire import MASKED_SUM, NO_MONITOR, Call, message_types, process, to_record
from hedgerow.wire.masked_sums import clips_of

REQUIRED, SOUND = 'secure-sums = "required"', 'privacy = "sound"'
PROBLEM = squares(2, 1, 8, 2, 12)[0]
APPS: Mapping[str, BatchClientApp] = {
    "sd-feel": sd_feel_client(),
    "similarity-free": similarity_free_client(),
    "fedmud": fedmud_client(),
    "ceps": ceps_client(lambda context: PROBLEM),
    "hsgd": hsgd_client(own_party, own=lambda context: True),  # type: ignore[arg-type]
}
EVERYBODY = {"query.whoami", "query.state", "query.restore"}
SUMS = {"query.sum_keys", "query.sum_shares"}
# What is answered though it asks for no secure sum; a type that is new is in none of these.
COVERED: Mapping[str, Mapping[str, set[str]]] = {
    REQUIRED: {
        "sd-feel": EVERYBODY | SUMS | {"query.standardise", "train.intra", "train.gossip"},
        "similarity-free": EVERYBODY | SUMS | {"query.standardise"},
        "fedmud": EVERYBODY | SUMS | {"query.standardise", "query.merge"},
        "ceps": EVERYBODY,
        "hsgd": EVERYBODY | {"query.pair", "query.pool", "query.setup"},
    },
}
COVERED = {
    **COVERED,
    SOUND: {
        **COVERED[REQUIRED],
        "ceps": EVERYBODY | {"query.hello", "query.publish", "train.update"},
        "hsgd": COVERED[REQUIRED]["hsgd"] | {"train.exchange", "train.update", "evaluate.encode"},
    },
}
SUMMED = {"sd-feel": "train", "similarity-free": "train", "fedmud": "train"}


def node(folder: Path, policy: str, **config: Any) -> Context:
    (folder / "policy.toml").write_text(policy + '\nledger = "ledger.jsonl"\n')
    named = {"partition-id": 0, "policy": str(folder / "policy.toml"), **config}
    return Context(1, 7, named, RecordDict(), {})


def answer(app: BatchClientApp, kind: str, context: Context, **records: Any) -> RecordDict | Exception:
    return contexts.answer(app, kind, context, RecordDict(records))


def is_covered(told: RecordDict | Exception) -> bool:
    return UNPROTECTED not in str(told) and NO_MONITOR not in str(told)


@pytest.mark.parametrize("policy", COVERED)
@pytest.mark.parametrize("name", APPS)
def test_only_listed_types_get_past_a_strict_policy(name: str, policy: str, device: Path) -> None:
    app = APPS[name]
    found = {kind for kind in app._handlers if is_covered(answer(app, kind, node(device, policy)))}
    assert found == COVERED[policy][name]


@pytest.mark.parametrize("name", SUMMED)
def test_the_secure_sum_of_an_app_gets_past_both(name: str, device: Path) -> None:
    for policy in (REQUIRED, SOUND):
        told = answer(APPS[name], SUMMED[name], node(device, policy), **{MASKED_SUM: ConfigRecord()})
        assert is_covered(told)


def test_every_message_type_of_the_suite_is_one_of_an_app() -> None:
    kinds = {value for key, value in vars(message_types).items() if key.isupper()}
    texts = {kind for kind in kinds if isinstance(kind, str) and kind.partition(".")[0] in ("train", "query")}
    assert texts <= {kind for app in APPS.values() for kind in app._handlers}


@pytest.mark.parametrize("policy", [REQUIRED, SOUND])
def test_a_refused_message_runs_no_handler_and_has_one_phrase(policy: str, device: Path) -> None:
    ran: list[str] = []

    def work(call: Call) -> RecordDict:
        ran.append(call.message_type)
        raise ValueError("what it finds in the records")

    app = BatchClientApp({"query.new": each(work), "train": each(work)})
    phrases = {str(answer(app, kind, node(device, policy))) for kind in ("query.new", "train")}
    assert (len(phrases), ran) == (1, [])


def test_a_handler_that_does_not_do_what_it_declares_is_refused_and_changes_no_state(device: Path) -> None:
    def work(call: Call) -> RecordDict:
        call.context.state["mine"] = ConfigRecord({"seen": True})
        if "noise" in call.content:
            check_privacy("sound", 9.0, 1.0)
        return RecordDict({"metrics": MetricRecord({"loss": 1.0})})

    app, context = BatchClientApp({"query.new": reveals(Reveals.NOISED, each(work))}), node(device, SOUND)
    assert not is_covered(answer(app, "query.new", context))
    assert not context.state
    assert isinstance(answer(app, "query.new", context, noise=ConfigRecord()), RecordDict)
    assert context.state


def test_a_handler_that_fails_changes_no_state_of_a_device(device: Path) -> None:
    def work(call: Call) -> RecordDict:
        call.context.state["mine"] = ConfigRecord({"seen": True})
        raise ValueError("no")

    app, context = BatchClientApp({"train": each(work)}), node(device, "")
    assert isinstance(answer(app, "train", context), Refusal)
    assert not context.state


def test_the_node_config_demands_sums_as_the_policy_does(device: Path) -> None:
    context = Context(1, 7, {"partition-id": 0, "secure-sum": True}, RecordDict(), {})
    for name, app in APPS.items():
        for kind in app._handlers:
            assert is_covered(answer(app, kind, context)) == (kind in COVERED[REQUIRED][name]), (name, kind)


def test_unprotected_answers_are_counted_whatever_becomes_of_them(device: Path) -> None:
    def work(call: Call) -> RecordDict:
        if "fails" in call.content:
            raise ValueError("no")
        return RecordDict({"metrics": MetricRecord({"loss": 1.0})})

    told = {"evaluate": each(work), "query.safe": reveals(Reveals.NOTHING, each(work))}
    app, context = BatchClientApp(told), node(device, "max-unprotected = 3")
    for records in ({}, {"fails": ConfigRecord()}, {}):
        assert "as often as" not in str(answer(app, "evaluate", context, **records))
        answer(app, "query.safe", context)
    # Under another run too: the ledger is the node's.
    context.run_id = 2
    assert "as often as" in str(answer(app, "evaluate", context))
    assert isinstance(answer(app, "query.safe", context), RecordDict)
    assert len(Releases(device / "ledger.jsonl").path.read_text().splitlines()) == 3


@pytest.fixture
def records(device: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    np.savez(device / "x.npz", x=x, y=np.arange(50) % 2)
    return device


def owner(
    folder: Path, run: int, policy: str = "", more: Mapping[str, Any] | None = None, **said: Any
) -> Any:
    context = node(folder, policy, data=str(folder / "x.npz"), **(more or {}))
    context.run_id = run
    context.run_config = {
        "partition": "own",
        "model": "logistic",
        "classes": "2",
        "standardise": "none",
        "seed": 1,
        **said,
    }
    return context


def moments(context: Context) -> list[float]:
    told = answer(APPS["sd-feel"], "query.statistics", context, config=ConfigRecord())
    if isinstance(told, Exception):
        raise told
    return [told["statistics"]["count"], *told["statistics"]["mean"]]  # type: ignore[list-item, misc]


def test_what_is_held_out_is_the_owners_to_say(records: Path) -> None:
    first = moments(owner(records, 1, holdout=0.0, seed=0))
    assert first[0] == 40  # The owner's default, a fifth.
    for run, said in enumerate(({"holdout": 0.02}, {"holdout": 0.5, "seed": 3}, {"seed": 9}), 2):
        assert moments(owner(records, run, **said)) == first
    with process.simulated():
        simulated_node = owner(records, 1, holdout=0.0, seed=0)
        del simulated_node.node_config["policy"]
        assert moments(simulated_node)[0] == 50


def test_another_sum_over_the_same_records_is_refused_in_every_run(records: Path) -> None:
    moments(owner(records, 1))
    with pytest.raises(Refusal, match="as often as it may"):
        moments(owner(records, 2, more={"holdout": 0.22}))  # The owner changed what is held out.
    moments(owner(records, 3, policy="max-pooled = 2", more={"holdout": 0.22}))
    moments(owner(records, 4))


def test_a_node_trains_again_on_an_unchanged_file_and_on_a_grown_one_as_its_owner_allows(
    records: Path,
) -> None:
    first = moments(owner(records, 1))
    assert moments(owner(records, 2)) == first
    with np.load(records / "x.npz") as file:
        x, y = file["x"], file["y"]
    np.savez(records / "x.npz", x=np.concatenate([x, x[:20] + 1]), y=np.concatenate([y, y[:20]]))
    _held.cache_clear()
    with pytest.raises(Refusal, match=r"max-pooled: this node's records changed") as refused:
        moments(owner(records, 3))
    assert "raise it by one" in str(refused.value.__cause__)
    second = moments(owner(records, 3, policy="max-pooled = 2"))
    assert second[0] == 56
    # What was reported may be repeated, also under the stricter policy.
    assert moments(owner(records, 4)) == second


def test_nothing_is_measured_on_fewer_samples_than_the_owner_allows(records: Path) -> None:
    for share, most in ((0.08, False), (0.1, True)):
        context = owner(records, 1, more={"holdout": share})
        told = answer(APPS["sd-feel"], "evaluate", context, arrays=_logistic())
        assert isinstance(told, RecordDict) == most


def _logistic() -> Any:
    return to_record(build_model("logistic", (3,), 2, 0).state_dict())


def test_a_member_of_a_sum_whose_training_fails_looks_like_any_other(device: Path) -> None:
    def train(call: Call) -> RecordDict:
        size = call.content.array_records["arrays"]["w"].numpy().size
        found = {"nan": np.full(size, np.nan), "fine": np.ones(size)}
        if call.partition_id not in (0, 1):
            raise ValueError("what it finds in the records")
        arrays = to_record({"w": found[("fine", "nan")[call.partition_id]]})
        return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 9})})

    app = BatchClientApp(masked_sum_handlers(each(train), plain_metrics=lambda call: {"num-steps": 2}))
    nodes = Nodes(3, app, policy=node(device, REQUIRED).node_config["policy"])
    plan = nodes.plan(max_weight=9.0, metrics=("train-loss",))
    replies = nodes.told(plan)
    shapes = [
        {name: {key: len(str(key)) for key in record} for name, record in reply.items()}
        for reply in replies.values()
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert [reply["metrics"] for reply in replies.values()] == [MetricRecord({"num-steps": 2})] * 3
    # Only the first member's update is in the sum, at its weight.
    total, _ = nodes.total(plan, replies)
    assert total is not None
    values = plan.grid.decode(total, clips_of({"w": np.zeros(40)}, plan))
    assert values[:41] == pytest.approx([1.0] * 41, abs=1e-6)
