from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from tests.clients import contexts
from tests.clients.hsgd.federation import (
    Federation,
    context,
    got,
    half_square,
    metrics_of,
    scalar_model,
    sent,
    tanh_model,
)
from tests.oracles.test_hsgd_oracle import (
    network,
)

from hedgerow.clients import Party, hsgd_client
from hedgerow.clients.hsgd.node import _warn_of_revealing
from hedgerow.clients.hsgd.step import block_size
from hedgerow.tasks import split_loss, split_model
from hedgerow.wire import Call, view

Array = np.ndarray


LAYOUTS = ("devices", "edges")


def tanh_federation(seed: int = 0, **options: Any) -> Federation:
    model, start, groups = network(seed)
    split = tanh_model(groups[0].x1.shape[1], groups[0].x2.shape[1], model.e1, model.e2)
    columns = [(g.x1, g.x2, g.y) for g in groups]
    return Federation(split, columns, start._asdict(), loss=split_loss, **options)


# What a node keeps, and what it refuses.


def test_nodes_keep_their_model_its_iteration_and_batch_within_a_round_and_nothing_after() -> None:
    federation = tanh_federation()
    node = federation.node(0, 0)
    federation.ask("train.exchange", {node: sent({"device": federation.theta["device"]}, t=0)})
    kept = federation.contexts[node].state
    assert set(kept["hsgd"]) == {"device"}
    assert dict(kept["hsgd-at"]) == {"t": 0, "ids": ["0-0"], "pairs": False}
    content = sent({"head": federation.theta["head"], "zeta1": np.zeros((1, 3))}, t=0, steps=1, eta0=0.1)
    federation.ask("train.update", {node: content})
    assert not federation.contexts[node].state
    blocks = {key: federation.theta[key] for key in ("head", "hospital")}
    federation.ask("train.exchange", {0: sent(blocks, t=4, ids=["0-1", "0-2"])})
    content = sent({"zeta2": np.zeros((2, 2))}, t=4, steps=2, eta0=0.1, ids=["0-1", "0-2"])
    answer = federation.ask("train.update", {0: content})[0]
    state = federation.contexts[0].state
    assert set(answer) == {"metrics"}
    assert metrics_of(answer)["num-examples"] == 2
    assert set(state) == {"hsgd", "hsgd-at", "hsgd-before", "hsgd-before-at"}
    assert set(state["hsgd"]) == {"head", "hospital"}
    assert dict(state["hsgd-at"]) == {"t": 6, "ids": ["0-1", "0-2"], "pairs": False}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [False, True])
def test_a_device_that_is_lost_after_the_exchange_leaves_the_batch(layout: str, pairs: bool) -> None:
    grouping = "pairs" if pairs else "group"
    federation = tanh_federation(9, layout=layout)
    rng = np.random.default_rng(1)
    head, zeta1, zeta2 = federation.theta["head"], rng.normal(size=(3, 3)), rng.normal(size=(3, 2))
    blocks = {key: federation.theta[key] for key in ("head", "hospital")}

    def trained(ids: list[str], survivors: list[int]) -> Array:
        federation.ask("train.exchange", {0: sent(blocks, t=0, ids=ids, grouping=grouping)})
        left = [ids[n] for n in survivors]
        content = sent({"zeta2": zeta2[survivors]}, t=0, steps=2, eta0=0.1, ids=left, upload=True)
        hospital = got(federation.ask("train.update", {0: content})[0])["hospital"]
        if layout == "devices":
            return hospital
        node = federation.node(0, 0)
        own = sent({"device": federation.theta["device"]}, t=0, ids=ids, grouping=grouping)
        federation.ask("train.exchange", {node: own})
        heads = np.stack([head] * len(left)) if pairs else head
        content = sent({"head": heads, "zeta1": zeta1[survivors]}, t=0, steps=2, eta0=0.1, ids=left)
        content["config"]["upload"] = True
        edge = got(federation.ask("train.update", {node: content})[node])["device"]
        return np.concatenate([hospital.ravel(), edge])

    lost, never = trained(["0-0", "0-1", "0-2"], [0, 1]), trained(["0-0", "0-1"], [0, 1])
    assert np.array_equal(lost, never)


def ask_one(federation: Federation, kind: str, node: int, content: RecordDict) -> RecordDict | Exception:
    return contexts.answer(federation.app, kind, federation.contexts[node], content)


def test_without_the_model_of_its_iteration_or_its_people_a_node_refuses_to_go_on() -> None:
    federation = tanh_federation()
    update = sent({"zeta2": np.zeros((1, 2))}, t=2, steps=2, eta0=0.1, ids=["0-0"])
    blocks = {key: federation.theta[key] for key in ("head", "hospital")}
    for kind, content in (("train.exchange", sent({}, t=2, ids=["0-0"])), ("train.update", update)):
        answer = ask_one(federation, kind, 0, content)
        assert isinstance(answer, ValueError)
        assert "t is 2 in the message's config" in str(answer)
        assert "holds none" in str(answer)
    federation.ask("train.exchange", {0: sent(blocks, t=4, ids=["0-0"])})
    assert "holds that of iteration 4" in str(ask_one(federation, "train.update", 0, update))
    stranger = sent({"zeta2": np.zeros((1, 2))}, t=4, steps=1, eta0=0.1, ids=["0-2"])
    answer = ask_one(federation, "train.update", 0, stranger)
    assert isinstance(answer, ValueError)
    assert "must be those of the batch at iteration 4" in str(answer)


def begin(head: Array | None = None, hospital: Array | None = None, **config: Any) -> RecordDict:
    blocks = {"head": head, "hospital": hospital}
    arrays = {key: block for key, block in blocks.items() if block is not None}
    return sent(arrays, **{"t": 0, "ids": ["0-1"], **config})


STEPS = {"t": 0, "steps": 1, "eta0": 0.1, "ids": ["0-1"]}
STRANGERS = ["0-1", "x", "y"]
REFUSED_EXCHANGES = [
    (r"ids must be among the 8 people of this hospital.*got \['x', 'y'\].*2 in all", begin(ids=STRANGERS)),
    ("ids is missing", sent({}, t=0)),
    (r"ids must be a non-empty list .*got \[\]", begin(ids=[])),
    ("ids must have each id once, got 1 twice", begin(ids=["0-1", "0-1"])),
    ("t must be .*got -1", begin(t=-1)),
    ("grouping must be .*got 'all'", begin(grouping="all")),
    ("compress must be false with grouping 'pairs'", begin(grouping="pairs", compress=True)),
    ("noise-multiplier must come with clip, got 1.0", begin(**{"noise-multiplier": 1.0})),
    (r"wrong shape: 'head' has \(2,\), expected \(6,\)", begin(np.zeros(2), np.zeros(12))),
    ("missing key: 'hospital'", begin(np.zeros(6))),
    ("non-finite", begin(np.full(6, np.nan), np.zeros(12))),
    ("wrong dtype", begin(np.zeros(6, int), np.zeros(12))),
    ("must have a ConfigRecord 'config'", RecordDict({"settings": ConfigRecord({"t": 0})})),
]
REFUSED_UPDATES = [
    ("steps must be .*got 0", sent({}, **(STEPS | {"steps": 0}))),
    ("eta0 must be .*got None", sent({}, t=0, steps=1, ids=["0-1"])),
    ("mu must be .*got -1", sent({}, **STEPS, mu=-1.0)),
]
REFUSED = [
    *((message, "exchange", content) for message, content in REFUSED_EXCHANGES),
    *((message, "update", content) for message, content in REFUSED_UPDATES),
]


@pytest.mark.parametrize(("message", "kind", "content"), REFUSED)
def test_a_bad_message_is_an_error_that_names_what_is_wrong(
    message: str, kind: str, content: RecordDict
) -> None:
    with pytest.raises(ValueError, match=message):
        raise ask_one(tanh_federation(), f"train.{kind}", 0, content)  # type: ignore[misc]


def test_garbage_in_a_payload_fails_its_node_alone() -> None:
    federation = tanh_federation()
    nodes = [federation.node(0, n) for n in range(2)]
    start = sent({"device": federation.theta["device"]}, t=0)
    federation.ask("train.exchange", dict.fromkeys(nodes, start))
    handler = federation.app.batch_handler("train.update")
    assert handler is not None
    good = sent({"head": federation.theta["head"], "zeta1": np.zeros((1, 3))}, t=0, steps=1, eta0=0.1)
    bad = sent({}, {"head": b"garbage", "zeta1": [b"x"]}, t=0, steps=1, eta0=0.1)
    answers = handler(
        [
            Call(content, federation.contexts[node], "train.update")
            for content, node in zip((good, bad), nodes, strict=True)
        ]
    )
    assert isinstance(answers[0], RecordDict)
    assert isinstance(answers[1], ValueError)
    assert "wrong shape: a row is not of 5 bytes" in str(answers[1])


# Set-up.


def test_a_party_introduces_itself_without_data_or_labels() -> None:
    federation = tanh_federation()
    answers = federation.ask("query.pair", {0: sent({}, seed=1), 3: sent({}, seed=1)})
    people = [f"0-{n}" for n in range(8)]
    hospital = {"role": "hospital", "group": 0, "ids": people, "encoding": 3}
    assert dict(answers[0].config_records["pair"]) == hospital
    told = {"role": "device", "group": 0, "ids": ["0-0"], "encoding": 2}
    assert dict(answers[3].config_records["pair"]) == told
    assert all(set(answer) == {"pair"} for answer in answers.values())
    answer = tanh_federation(layout="edges").ask("query.whoami", {4: RecordDict()})[4]
    assert answer.config_records["whoami"]["num-examples"] == 4


def test_an_encoding_as_long_as_the_features_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _warn_of_revealing.cache_clear()
    said: list[Any] = []
    monkeypatch.setattr("hedgerow.clients.hsgd.node.log", lambda *words: said.append(words))
    toy = Federation(scalar_model(), [(np.ones((2, 1)), np.ones((2, 1)), np.ones(2))], {}, loss=half_square)
    # Encodings of 1 of 1 feature, and of 2 of 3.
    for federation, device in ((toy, np.ones(1)), (tanh_federation(), np.ones(6))):
        for n in range(2):
            content = sent({"device": device}, t=0)
            federation.ask("train.exchange", {federation.node(0, n): content})
    assert [words[2:] for words in said] == [(1, 1)]


def test_a_models_dtype_travels() -> None:
    model = split_model("mlp", (4,), (4,), 2, seed=0)
    party = Party("device", 0, ["a"], torch.ones(1, 4), torch.zeros(1, dtype=torch.int64), model)
    app = hsgd_client(lambda _: party)
    theta = np.zeros(block_size(model.device), np.float32)
    answer = contexts.answered(app, "train.exchange", context(0), sent({"device": theta}, t=0))
    assert view(answer.array_records["arrays"]["zeta2"]).dtype == np.float32
