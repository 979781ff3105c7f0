"""Whatever a server sends, or gives back as a node's state, is answered with an error or as it should be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from tests.clients import contexts
from tests.clients.ceps.federation import squares
from tests.clients.fedmud.test_client import CLASSES, plan_of
from tests.clients.fedmud.test_client import message as fedmud_message
from tests.clients.hsgd.federation import half_square, scalar_model
from tests.clients.similarity_free.test_client import GRADIENT, PROX
from tests.clients.training.cases import torch_seeded
from tests.wire.fuzzing import Decoder, Rng, garbage_bytes, hunt, mutated_bytes
from torch import nn

from hedgerow.clients import (
    BatchClientApp,
    LocalTask,
    Party,
    ceps_client,
    fedmud_client,
    hsgd_client,
    similarity_free_client,
)
from hedgerow.clients.instructions import local_steps
from hedgerow.wire import (
    MAX_SAMPLES,
    MAX_STEPS,
    NODE_RECORD,
    RESTORE,
    STATE,
    encode_indices,
    finite_views,
    parse_codec,
    to_record,
)

RNG = np.random.default_rng(5)
X = torch.as_tensor(RNG.standard_normal((12, 3)), dtype=torch.float32)
Y = torch.as_tensor(RNG.integers(0, 2, 12))


def context(state: RecordDict | None = None) -> Context:
    return contexts.context(state=RecordDict() if state is None else state.copy())


def answered(app: BatchClientApp, kind: str, content: RecordDict, own: Context) -> RecordDict:
    return contexts.answered(app, kind, own, content)


def is_answer(answer: RecordDict) -> bool:
    """Whether a server could use it: arrays that are finite, and numbers."""
    for record in answer.array_records.values():
        finite_views(record)
    return isinstance(answer, RecordDict) and not any(
        isinstance(value, str) for record in answer.metric_records.values() for value in record.values()
    )


def told(
    name: str, app: BatchClientApp, kind: str, content: RecordDict, state: RecordDict | None = None
) -> Decoder:
    """Return the decoder of an instruction."""
    dear = 5 if name == "ceps-update" else 1
    return Decoder(
        name, content, lambda sent: answered(app, kind, sent, context(state)), is_answer, dear=dear
    )


def kept(name: str, app: BatchClientApp, kind: str, content: RecordDict, state: RecordDict) -> Decoder:
    """Return the decoder of what a node keeps, which ``query.restore`` may have brought."""
    return Decoder(
        f"{name}-state",
        state,
        lambda held: answered(app, kind, content, context(held)),
        is_answer,
        errors=(ValueError, ArithmeticError, LookupError, RuntimeError, TypeError),
    )


# The similarity-free family


def logistic() -> nn.Module:
    return torch_seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def averaging() -> list[Decoder]:
    model = logistic()
    app = similarity_free_client(lambda own: LocalTask(model, X, Y, np.arange(12)), "loop")
    arrays = to_record({key: value.clone() for key, value in model.state_dict().items()})

    def content(**changes: Any) -> RecordDict:
        config = {key.replace("_", "-"): value for key, value in changes.items()}
        return RecordDict({"arrays": arrays.copy(), "config": ConfigRecord({**GRADIENT, **config})})

    decoders = [
        told("gradient", app, "train", content()),
        told("prox", app, "train", content(**{**PROX, "inner-steps": 5})),
        told("evaluate", app, "evaluate", content()),
        told("probe", app, "query.probe", content()),
    ]
    for compressor in ("topk(3)", "topk(0.4)", "sign", "ternary"):
        feedback = {"compressor": compressor, "error_feedback": True}
        own = context()
        answered(app, "train", content(**feedback), own)
        again = content(**feedback, round_index=1, acknowledged=-1)
        decoders.append(told(f"gradient-{compressor}", app, "train", again, own.state))
        decoders.append(kept(f"gradient-{compressor}", app, "train", again, own.state))
    return decoders


# The FedMUD family


def layered(method: str, **changes: Any) -> list[Decoder]:
    model = torch_seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 7), nn.Linear(7, CLASSES)
        )
    )
    x = torch.as_tensor(RNG.standard_normal((12, 1, 8, 8)), dtype=torch.float32)
    app = fedmud_client(lambda own: LocalTask(model, x, Y, np.arange(12)), "loop")
    own = context()
    first = fedmud_message(model, own, method=method, **changes).content
    answered(app, "train", first, own)
    second = fedmud_message(model, own, method=method, drop=("base",), version=1, **changes).content
    config = first.config_records["config"]
    plan = plan_of(model, config if method == "factored" else {**config, "variant": "lmt"})
    (layer,) = plan.layers
    updates: dict[str, dict[str, Any]] = {
        "factored": plan.init(5, 0),
        "ef21p": {
            "indices": encode_indices(np.array([0, 4, 9]), layer.size),
            "values": np.ones(3, np.float32),
        },
        "fedbat": {
            f"{layer.key}:bits": np.packbits(RNG.random(layer.size) < 0.5),
            f"{layer.key}:alpha": np.full(1, 0.1, np.float32),
        },
    }
    name = "merges" if method == "factored" else "updates"
    second[name] = to_record({f"0/{key}": value for key, value in updates[method].items()})
    return [
        told(f"{method}-base", app, "train", first),
        told(f"{method}-update", app, "train", second, own.state),
        told(f"{method}-listen", app, "query.merge", second, own.state),
        kept(method, app, "train", second, own.state),
    ]


# CEPS and what it is compared with

CEPS: dict[str, Any] = {
    "method": "ceps",
    "run-seed": 3,
    "num-nodes": 3,
    "neighbours": [0, 2],
    "s": 2,
    "d": 40,
    "codec": "1bcs",
    "r": 1.0,
    "kappa-low": 2,
    "kappa-high": 2,
    "mu": 0.1,
    "sigma-rule": "fixed_c",
    "c": 5.0,
    "privacy": "none",
}


def gossiping(name: str, **changes: Any) -> list[Decoder]:
    problem = squares(1, 1, 8, 2)[0]
    app = ceps_client(lambda own: problem)
    config = ConfigRecord({**CEPS, **{key.replace("_", "-"): value for key, value in changes.items()}})
    hello, own = RecordDict({"config": config}), context()
    answered(app, "query.hello", hello, own)
    ask = RecordDict({"config": ConfigRecord({"iteration": 2, "receivers": [0, 2]})})
    look = RecordDict({"config": ConfigRecord({"iteration": 2}), "arrays": to_record({"mean": np.zeros(8)})})
    published = answered(app, "query.publish", ask, context(own.state)).config_records["payload"]["bytes"]
    payload = published[0] if isinstance(published, list) else published
    update = RecordDict(
        {
            "config": ConfigRecord({"iteration": 2, "monitor": True}),
            "bundle": ConfigRecord({"0": payload, "2": payload}),
        }
    )
    return [
        told(f"{name}-hello", app, "query.hello", hello),
        told(f"{name}-publish", app, "query.publish", ask, own.state),
        told(f"{name}-update", app, "train.update", update, own.state),
        told(f"{name}-look", app, "query.monitor", look, own.state),
        kept(name, app, "query.publish", ask, own.state),
    ]


# HSGD


def parties(role: str, compress: bool) -> list[Decoder]:
    party = Party(
        role, 0, ["a", "b"], torch.ones(2, 1).double(), torch.ones(2).double(), scalar_model(), half_square
    )
    app = hsgd_client(lambda own: party)
    hospital = role == "hospital"
    start = {"head": np.ones(2), "hospital": np.ones(1)} if hospital else {"device": np.ones(1)}
    exchange = RecordDict(
        {
            "config": ConfigRecord(
                {"t": 0, "ids": ["a", "b"], "grouping": "group", "compress": compress, "clip": 1.0}
            ),
            "arrays": to_record(start),
        }
    )
    own = context()
    answered(app, "train.exchange", exchange, own)
    config = ConfigRecord({"t": 0, "steps": 2, "eta0": 0.1, "ids": ["a", "b"], "upload": not compress})
    parts: dict[str, Any] = (
        {"zeta2": np.ones((2, 1))} if hospital else {"head": np.ones(2), "zeta1": np.ones((2, 1))}
    )
    row = np.float32(1).tobytes()
    coded: dict[str, Any] = {"zeta2": [row] * 2} if hospital else {"head": row + b"\0", "zeta1": [row] * 2}
    sent = ConfigRecord(coded) if compress else to_record(parts)
    update = RecordDict({"config": config, "payload" if compress else "arrays": sent})
    name = f"{role}{'-compressed' if compress else ''}"
    return [
        told(f"{name}-exchange", app, "train.exchange", exchange),
        told(f"{name}-update", app, "train.update", update, own.state),
        kept(name, app, "train.update", update, own.state),
    ]


# Every app


def restoring() -> Decoder:
    app = BatchClientApp({})
    state = RecordDict({"memory": to_record({"e": np.arange(3.0)}), "status": ConfigRecord({"run": "1"})})
    sent = answered(app, STATE, RecordDict(), context(state))

    def restored(content: RecordDict) -> Context:
        own = context()
        answered(app, RESTORE, content, own)
        return own

    return Decoder("restore", sent, restored, lambda own: NODE_RECORD not in own.state)


DECODERS = [
    *averaging(),
    *layered("factored"),
    *layered("factored", variant="mud+bkd"),
    *layered("ef21p", variant="dense", keep=3),
    *layered("fedbat", variant="dense", signs=10_000),
    *gossiping("ceps"),
    gossiping("ceps-receivers", phi_owner="receiver")[1],
    *gossiping("d-psgd", method="d-psgd", codec="dense64", eta=0.01, weights=[0.3, 0.3, 0.4]),
    *gossiping("dfedavgm", method="dfedavgm", codec="quantised8", eta=0.01, theta=0.5, local_steps=2),
    *gossiping(
        "choco-sgd", method="choco-sgd", codec="quantised8", eta=0.01, weights=[0.3, 0.3, 0.4], step_gamma=0.5
    ),
    *gossiping("sgp", method="sgp", codec="dense64", eta=0.01, weights=[0.3, 0.5, 0.4], local_steps=2),
    *gossiping("dcd-psgd", method="dcd-psgd", codec="quantised8", eta=0.01, weights=[0.3, 0.3, 0.4]),
    *gossiping("dp-dsgt", method="dp-dsgt", codec="dense64", eta=0.01),
    *(
        decoder
        for role in ("hospital", "edge")
        for coded in (False, True)
        for decoder in parties(role, coded)
    ),
    restoring(),
]
every_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=str)


@every_decoder
def test_a_node_that_is_sent_anything_answers_with_an_error_or_as_it_should(decoder: Decoder) -> None:
    hunt(decoder, 24)


@pytest.mark.slow
@every_decoder
def test_a_node_that_is_sent_thousands_of_things_answers(decoder: Decoder) -> None:
    hunt(decoder, 1000, explore=True)


@pytest.mark.parametrize("codec", ["1bcs", "sparse32", "dense64", "quantised8"])
def test_a_neighbours_broken_bytes_cost_its_own_message_alone(codec: str) -> None:
    code, seed = parse_codec(codec, s=3, d=60), (1, 2, 3)
    vector = np.where(np.arange(20) < 3, 1.0, 0.0)
    good = code.encode(vector, seed)
    spoil: list[Callable[[Rng], bytes]] = [
        lambda rng: mutated_bytes(good, rng),
        lambda rng: garbage_bytes(rng, len(good)),
    ]
    for number in range(20):
        bad = spoil[number % 2](np.random.default_rng(number))
        first, last = (code.decode_many([good, bad, good], 20, [seed] * 3)[i] for i in (0, 2))
        assert np.array_equal(first, code.decode(good, 20, seed))
        assert np.array_equal(last, first)


@pytest.mark.parametrize(
    ("asked", "samples", "valid"),
    [(MAX_STEPS + 1, 1, MAX_STEPS), (1000, MAX_SAMPLES // 10, 10), (2, MAX_SAMPLES, 1)],
)
def test_more_steps_than_their_batches_may_fill_are_refused(asked: int, samples: int, valid: int) -> None:
    config = ConfigRecord({"local-epochs": asked})
    with pytest.raises(
        ValueError,
        match=rf"local-epochs must be an integer from 1 to {valid}, got {asked} in the message's config$",
    ):
        local_steps(config, "local-epochs", samples)


def test_a_node_takes_no_state_that_it_would_not_tell_nor_one_of_another_partition() -> None:
    own = context()
    own.node_config["share-state"] = False
    content = RecordDict(
        {NODE_RECORD: ConfigRecord({"partition-id": 1, "run": "1"}), "x": MetricRecord({"a": 1})}
    )
    with pytest.raises(PermissionError, match="share-state is false"):
        answered(BatchClientApp({}), RESTORE, content, own)
    content = RecordDict({NODE_RECORD: ConfigRecord({"partition-id": 4, "run": "1"})})
    with pytest.raises(ValueError, match="must be of a run and the partition 1"):
        answered(BatchClientApp({}), RESTORE, content, context())


def test_neither_a_matrix_that_would_fill_the_memory_nor_steps_for_ever_are_obeyed() -> None:
    app = ceps_client(lambda own: squares(1, 1, 8, 2)[0])
    hello = RecordDict({"config": ConfigRecord({**CEPS, "d": 2**40})})
    with pytest.raises(ValueError, match=rf"must be at most .*got d = {2**40} and s = 2"):
        answered(app, "query.hello", hello, context())
    own = context()
    answered(app, "query.hello", RecordDict({"config": ConfigRecord(CEPS)}), own)
    ask = RecordDict({"config": ConfigRecord({"iteration": 2**40})})
    with pytest.raises(ValueError, match=rf"iteration must be at most {MAX_STEPS} after .*got {2**40}"):
        answered(app, "query.publish", ask, own)
