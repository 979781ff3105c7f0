"""A run's numbers in Prometheus's text format, which ``hedgerow watch`` serves under ``/metrics``.

Names of metrics, losses and nodes come from outside: they are values of labels, never names of metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hedgerow.sim.runs.trackers import scalars_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("waiting", "running", "stopped", "finished")
# What the sources of ``scalars_of`` are called here: name, type and help of the metric, name of its label.
_FAMILIES = {
    "cost": ("hedgerow_cost", "counter", "Traffic and seconds since the start of the run.", "name"),
    "replies": ("hedgerow_replies", "gauge", "Instructions and replies of the last round.", "name"),
}
_METRIC = ("hedgerow_metric", "gauge", "Metrics of the last round that has them.", "name")


def prometheus_text(run: str, state: str, records: Iterable[Mapping[str, Any]]) -> str:
    """Return the metrics of a run.

    Parameters
    ----------
    run : str
        Its name, the label ``run`` of every sample.
    state : str
        ``waiting``, ``running``, ``stopped`` or ``finished``.
    records : Iterable[Mapping[str, Any]]
        Its rounds, as in ``rounds.jsonl``, in order; none while it is waiting.
    """
    last: dict[str, float] = {}
    lost: Counter[str] = Counter()
    latest, seconds = None, 0.0
    for record in records:
        latest = record["round"]
        seconds += record.get("wall_seconds") or 0.0
        last |= scalars_of(record)
        lost.update(record.get("rejected", {}))
    last["cost/wall_seconds"] = seconds
    lines = _Lines(run)
    for one in _STATES:
        lines.add(
            "hedgerow_run_state", "gauge", "1 for the state that the run is in.", one == state, state=one
        )
    if latest is None:
        return lines.text()
    lines.add("hedgerow_round", "gauge", "The last recorded round.", latest)
    for tag, value in sorted(last.items()):
        source, _, name = tag.partition("/")
        if source == "lost" or tag == "replies/lost":
            continue
        metric, kind, told, label = _FAMILIES.get(source, _METRIC)
        of = {} if source in _FAMILIES else {"source": source}
        lines.add(metric, kind, told, value, **of, **{label: name})
    for reason, count in sorted(lost.items()):
        lines.add("hedgerow_lost_replies", "counter", "Lost replies since the start.", count, reason=reason)
    return lines.text()


class _Lines:
    """Samples, by metric, each metric with its help and type once."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: dict[str, list[str]] = {}

    def add(self, metric: str, kind: str, told: str, value: float, **labels: str) -> None:
        """Add a sample."""
        # The format's rule for counters.
        name = f"{metric}_total" if kind == "counter" else metric
        lines = self._metrics.setdefault(name, [f"# HELP {name} {told}", f"# TYPE {name} {kind}"])
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": self._run, **labels}.items())
        lines.append(f"{name}{{{pairs}}} {_number(float(value))}")

    def text(self) -> str:
        """Return all of them."""
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def _escaped(text: str) -> str:
    """Return a label's value: backslash, quote and line feed escaped, nothing that UTF-8 cannot hold."""
    plain = text.encode("utf-8", "replace").decode()
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
