"""Evaluation of held-out people, whose halves are at different parties, from histograms of scores.

Devices send encodings, as in training. The hospital has the labels and the head, and reports the number of
people per class and score bin. The histograms of all hospitals give the curves. A person's score leaves the
hospital only if it is alone in its bin.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.messages import Schema, Share, Theta, records, refused_peers
from hedgerow.strategies.hsgd.parties import Conversation, Group, PartyLinks
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.wire.message_types import ENCODE, SCORE
from hedgerow.wire.parties import CALIBRATION_BINS, EVALUATED, INTRODUCTIONS
from hedgerow.wire.records import PayloadError, view

Counts = NDArray[np.float64]

BINS = 1000


@dataclass(frozen=True)
class Scores:
    """One hospital's report on its evaluated people."""

    count: int  # Number of people, >= 1.
    loss: float  # Mean cross-entropy in nats.
    accuracy: float
    # (classes, 2, bins): people by the probability of a class, those of other classes and those of the class.
    # Two classes have one row.
    scores: Counts
    # (3, 15): by the probability of the predicted class, all people, correct ones, and sum of probabilities.
    calibration: Counts


def evaluate_groups(
    talk: Conversation,
    grid: Grid,
    groups: Mapping[int, Group],
    models: Mapping[int, Theta],
    schema: Schema,
    config: Mapping[str, Any],
    links: PartyLinks,
) -> dict[int, Scores]:
    """Return each group's scores under its model; ``config`` has ``t`` and the noise on encodings."""
    asked: dict[int, list[str]] = {}
    hospitals: dict[int, int] = {}
    contents = []
    for m, group in sorted(groups.items()):
        there = {i for i in group.partitions if not links.sealed or i in links.names}
        for node in sorted({*group.node_of.values()} & there) if group.hospital in there else ():
            asked[node], hospitals[node] = group.people_at(node), group.hospital
            blocks = records(device=models[m].device)
            about = {**config, "ids": asked[node]}
            contents.append((node, _content(links, node, [group.hospital], about, blocks)))

    def check(i: int, content: RecordDict) -> Sequence[Share]:
        if links.sealed:
            content, refused = refused_peers(content)
            links.met(i, [hospitals[i]], refused)
        return schema.device_exchange(content, len(asked[i]), EVALUATED)

    shares = {one.node.partition_id: one.value for one in talk.ask(grid, ENCODE, contents, check)}
    contents, counted, nodes_of = [], {}, {}
    for m, group in sorted(groups.items()):
        people = [p for p in group.ids if len(shares.get(i := group.node_of[p], ())) and len(shares[i][0])]
        if not people:
            continue
        nodes = list(dict.fromkeys(group.node_of[person] for person in people))
        if links.sealed:
            zeta2 = {EVALUATED: [shares[i][0] for i in nodes]}
        else:
            row_of = {p: row for i in nodes for p, row in zip(asked[i], shares[i], strict=True)}
            zeta2 = {"zeta2": [row_of[person] for person in people]}
        blocks = records(head=models[m].head, hospital=models[m].hospital, **zeta2)
        about = {**config, "ids": people, "bins": BINS}
        contents.append((group.hospital, _content(links, group.hospital, nodes, about, blocks)))
        counted[group.hospital], nodes_of[group.hospital] = (m, len(people)), nodes

    def check_scores(i: int, content: RecordDict) -> Scores:
        count = counted[i][1]
        if links.sealed:
            content, refused = refused_peers(content)
            count -= sum(len(asked[node]) for node in links.met(i, nodes_of[i], refused))
            links.count_unopened(refused)
        return _scores(content, count)

    answers = talk.ask(grid, SCORE, contents, check_scores)
    if len(answers) < len(groups):
        lost = dict(+Counter(talk.report.rejected))
        log(WARNING, "Evaluation: %d of %d hospitals sent scores; lost: %s", len(answers), len(groups), lost)
    return {counted[one.node.partition_id][0]: one.value for one in answers}


def _content(
    links: PartyLinks, i: int, peers: Sequence[int], config: Mapping[str, Any], blocks: Mapping[str, Any]
) -> RecordDict:
    """Return a message; on sealed links, with the names of the peers, and the introductions of new ones."""
    if not links.sealed:
        return RecordDict({"config": ConfigRecord({**config}), **blocks})
    about = ConfigRecord({**config, **links.config(peers)})
    content = RecordDict({"config": about, **blocks})
    if lacking := links.lacking({i: peers}):
        content[INTRODUCTIONS] = lacking[i]
    return content


def _scores(content: RecordDict, count: int) -> Scores:
    """Return a hospital's reply; PayloadError unless it is valid and covers ``count`` people."""
    metrics = checked_metrics(content, "num-examples")
    if metrics["num-examples"] != count:
        raise PayloadError("bad weight", f"num-examples={metrics['num-examples']}, expected {count}")
    loss, accuracy = metrics.get("loss"), metrics.get("accuracy")
    if not isinstance(loss, int | float) or not isinstance(accuracy, int | float):
        raise PayloadError("bad metrics", "no loss or no accuracy")
    arrays = content.array_records.get("arrays", ArrayRecord())
    found = []
    for key, shape in (("scores", (None, 2, BINS)), ("calibration", (3, CALIBRATION_BINS))):
        value = view(arrays[key]) if key in arrays else np.zeros(0)
        fits = value.ndim == len(shape) and all(
            b in (None, a) for a, b in zip(value.shape, shape, strict=False)
        )
        if not fits or value.dtype != np.float64 or not np.isfinite(value).all() or value.min() < 0:
            raise PayloadError("bad scores", f"{key!r} must be a float64 array of counts")
        found.append(value)
    scores, calibration = found
    if not (scores.sum(axis=(1, 2)) == count).all() or calibration[0].sum() != count:
        raise PayloadError("bad scores", f"counts must be of {count} people")
    return Scores(count, float(loss), float(accuracy), scores, calibration)


def score_metrics(scores_of: Mapping[int, Scores], specificity: float) -> dict[str, float]:
    """Return the metrics over all groups; undefined ones are missing.

    - ``loss``, ``accuracy``, and ``worst-accuracy`` of a group;
    - ``auc``, ``auprc`` (average precision), and ``sensitivity``, the largest with at least the given
      specificity: of two classes the second's, else the mean over classes that some but not all people have;
    - ``ece``: the expected calibration error over 15 bins;
    - ``evaluated``: the number of people.

    Scores have a resolution of 1/1000.
    """
    shapes = Counter(one.scores.shape for one in scores_of.values())
    if not scores_of:
        return {}
    common, _ = shapes.most_common(1)[0]
    those = [one for _, one in sorted(scores_of.items()) if one.scores.shape == common]
    count = sum(one.count for one in those)
    scores = sum((one.scores for one in those), np.zeros(common))
    people, right, sure = sum((one.calibration for one in those), np.zeros((3, CALIBRATION_BINS)))
    out = {
        "loss": sum(one.count * one.loss for one in those) / count,
        "accuracy": sum(one.count * one.accuracy for one in those) / count,
    }
    curves = [_curve(own, specificity) for own in scores if own.sum(axis=1).all()]
    for place, name in enumerate(("auc", "auprc", "sensitivity")):
        if curves:
            out[name] = float(np.mean([curve[place] for curve in curves]))
    out["ece"] = float(np.abs(right - sure).sum() / people.sum())
    out["evaluated"] = count
    out["worst-accuracy"] = min(one.accuracy for one in those)
    return out


def _curve(counts: Counts, specificity: float) -> tuple[float, float, float]:
    """Return ROC area, average precision, and sensitivity at a specificity, from counts (2, bins)."""
    others, own = np.cumsum(counts[:, ::-1], axis=1)  # Numbers of people with at least this score.
    fpr, tpr = np.append(0, others / others[-1]), np.append(0, own / own[-1])
    auc = float(np.trapezoid(tpr, fpr))
    found = own + others > 0
    precision = np.where(found, own / np.maximum(own + others, 1), 0.0)
    auprc = float((np.diff(tpr) * precision).sum())
    return auc, auprc, float(tpr[fpr <= 1 - specificity + 1e-12].max())
