"""Every strategy of Flower's, plain and with compressed uplinks: the table in docs/strategies.md.

``python -m tests.strategies.compressed_table`` runs them all, some minutes, and redraws the table.
"""

import gc
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from numpy.typing import NDArray

from hedgerow.clients import compress_reply
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import Compressed

DOCUMENT = Path(__file__).parents[2] / "docs" / "strategies.md"
BEGIN, END = "<!-- table: compressed -->", "<!-- end of the table -->"
COMPRESSORS = ("topk(0.1)", "randk(0.1)", "sign", "ternary")
NODES, FEATURES, CLASSES, ROUNDS = 8, 20, 4, 30
# What an entry that waits ten rounds for randk(0.1) then brings at once must still be a step downhill.
STEP = 0.05
# A strategy works with a compressor if its loss falls by this share of what it falls by without.
SHARE = 0.8


@dataclass(frozen=True)
class Case:
    """A strategy of Flower's, the mod that its nodes need, and whether they feed back what was dropped."""

    name: str
    make: Callable[[], Strategy]
    mods: tuple[Any, ...] = ()
    feeds_back: bool = True

    def compressed(self, compressor: str) -> Compressed:
        return Compressed(self.make(), compressor, self.feeds_back)

    def refusal(self, compressor: str) -> str | None:
        """Return why the compressor is refused, None if it is not."""
        try:
            self.compressed(compressor)
        except ValueError as error:
            return str(error).split(": ", 1)[1]
        return None


def plain(kind: Callable[..., Strategy], **options: Any) -> Callable[[], Strategy]:
    return lambda: kind(fraction_evaluate=0.0, min_available_nodes=NODES, **options)


def private(kind: Any, **options: Any) -> Callable[[], Strategy]:
    return lambda: kind(plain(FedAvg)(), noise_multiplier=0.05, num_sampled_clients=NODES, **options)


def _cases() -> tuple[Case, ...]:
    adaptive = {"eta": 0.1, "tau": 1e-2}
    clipped = {"clipping_norm": 1.0}
    return (
        Case("FedAvg", plain(FedAvg)),
        Case("FedAvgM", plain(FedAvgM, server_momentum=0.5)),
        Case("FedProx", plain(FedProx, proximal_mu=0.1)),
        Case("QFedAvg", plain(QFedAvg, client_learning_rate=STEP, q=0.1)),
        Case("FedAdagrad", plain(FedAdagrad, **adaptive)),
        Case("FedAdam", plain(FedAdam, **adaptive)),
        Case("FedYogi", plain(FedYogi, **adaptive)),
        Case("FedMedian", plain(FedMedian)),
        Case("FedTrimmedAvg", plain(FedTrimmedAvg, beta=0.2)),
        Case("Krum", plain(Krum, num_malicious_nodes=1)),
        Case("MultiKrum", plain(MultiKrum, num_malicious_nodes=1, num_nodes_to_select=5)),
        Case("Bulyan", plain(Bulyan, num_malicious_nodes=1)),
        Case(
            "DP, server-side fixed clipping", private(DifferentialPrivacyServerSideFixedClipping, **clipped)
        ),
        Case("DP, server-side adaptive clipping", private(DifferentialPrivacyServerSideAdaptiveClipping)),
        Case(
            "DP, client-side fixed clipping",
            private(DifferentialPrivacyClientSideFixedClipping, **clipped),
            (fixedclipping_mod,),
            False,
        ),
        Case(
            "DP, client-side adaptive clipping",
            private(DifferentialPrivacyClientSideAdaptiveClipping),
            (adaptiveclipping_mod,),
            False,
        ),
        Case("FedXgbBagging", plain(FedXgbBagging)),
        Case("FedXgbCyclic", plain(FedXgbCyclic)),
    )


CASES = _cases()

Data = tuple[NDArray[np.float64], NDArray[np.int64]]


@cache
def samples(stream: int) -> Data:
    """Sixty points of four classes; a third of a node's are of one class."""
    rng = np.random.default_rng([7, stream])
    y = rng.integers(CLASSES, size=60)
    y[:20] = stream % CLASSES
    return rng.normal(size=(60, FEATURES)) + 1.5 * np.eye(CLASSES, FEATURES)[y], y


def loss_and_gradient(
    weights: NDArray[Any], bias: NDArray[Any], data: Data
) -> tuple[float, NDArray[Any], NDArray[Any]]:
    """Softmax regression: mean cross-entropy, and its gradients."""
    x, y = data
    logits = x @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    return float(loss), x.T @ p / len(y), p.mean(axis=0)


def client_app(*mods: Any) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        start = message.content.array_records["arrays"].to_numpy_ndarrays()
        mu = float(message.content.config_records["config"].get("proximal-mu", 0.0))
        data, (w, b) = samples(int(context.node_config["partition-id"])), start
        for _ in range(3):
            loss, dw, db = loss_and_gradient(w, b, data)
            w, b = w - STEP * (dw + mu * (w - start[0])), b - STEP * (db + mu * (b - start[1]))
        arrays = ArrayRecord([w.astype(np.float32), b.astype(np.float32)])
        metrics = MetricRecord({"num-examples": len(data[1]), "train_loss": loss})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def initial() -> ArrayRecord:
    return ArrayRecord([np.zeros((FEATURES, CLASSES), np.float32), np.zeros(CLASSES, np.float32)])


def loss_after(strategy: Strategy, num_rounds: int, *mods: Any) -> float:
    """Return the loss of the final model on data that no node has."""
    # Flower draws the order of the nodes, and noise, from the global generators.
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    grid = InProcessGrid(client_app(*mods), NODES)
    # Flower's robust strategies collect garbage once a reply: torch's objects need no look each time.
    gc.freeze()
    arrays = strategy.start(grid, initial(), num_rounds=num_rounds).arrays
    return loss_and_gradient(*arrays.to_numpy_ndarrays(), samples(NODES))[0]


def start_loss() -> float:
    """Return the loss of the initial model."""
    return loss_and_gradient(*initial().to_numpy_ndarrays(), samples(NODES))[0]


def works(loss: float, plain_loss: float) -> bool:
    """Return whether a compressed run did about what the plain one did."""
    return start_loss() - loss >= SHARE * (start_loss() - plain_loss)


def refusals() -> dict[tuple[str, str], str]:
    """Return why, by case and compressor; it takes no run."""
    told = {(case.name, name): case.refusal(name) for case in CASES for name in COMPRESSORS}
    return {place: reason for place, reason in told.items() if reason is not None}


def row(case: Case) -> dict[str, str]:
    """Return the cells of a case that are no refusals, by column."""
    open_to = [name for name in COMPRESSORS if case.refusal(name) is None]
    if not open_to:
        return {}
    alone = loss_after(case.make(), ROUNDS, *case.mods)
    cells = {"plain": f"{alone:.2f}"}
    for name in open_to:
        loss = loss_after(case.compressed(name), ROUNDS, compress_reply, *case.mods)
        cells[name] = f"{loss:.2f}" if works(loss, alone) else f"{loss:.2f}, worse"
    return cells


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of these rows, and under it the reasons of what is refused."""
    refused = refusals()
    reasons = list(dict.fromkeys(refused.values()))
    columns = ("plain", *COMPRESSORS)
    lines = [
        "| strategy | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for case in CASES:
        cells = dict(rows[case.name])
        cells |= {
            name: f"refused ({reasons.index(reason) + 1})"
            for (of, name), reason in refused.items()
            if of == case.name
        }
        name = case.name if case.feeds_back else f"{case.name} *"
        lines.append(f"| {name} | " + " | ".join(cells.get(column, "") for column in columns) + " |")
    lines.append("")
    lines += [f"{number}. Refused: {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines)


def documented() -> str:
    """Return the table as the document has it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def documented_rows() -> dict[str, dict[str, str]]:
    """Return the document's cells that are no refusals, by strategy and column."""
    header, _, *lines = [line for line in documented().splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in header.strip("|").split("|")][1:]
    rows = {}
    for line in lines:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        told = {column: cell for column, cell in zip(columns, cells, strict=True) if cell}
        rows[name.removesuffix(" *")] = {k: v for k, v in told.items() if not v.startswith("refused")}
    return rows


def redraw() -> None:
    """Run all and write the table into the document."""
    old = documented()
    new = table({case.name: row(case) for case in CASES})
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(
        text.replace(old, new) if old else text.replace(BEGIN, f"{BEGIN}\n\n{new}\n"), encoding="utf-8"
    )


if __name__ == "__main__":
    logging.getLogger("flwr").disabled = True
    with flower_identity(run_id=1):
        redraw()
