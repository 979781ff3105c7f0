"""What HSGD settles before its first round: which settings go together, and who its parties are.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the baselines of the experiments.
"""

from collections.abc import Mapping
from typing import NamedTuple

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import RosterError
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.costs import Method
from hedgerow.strategies.hsgd.groups import PairingError
from hedgerow.strategies.hsgd.messages import PAIR, Introduction, introduction
from hedgerow.strategies.hsgd.theory import halved_eta
from hedgerow.strategies.hsgd.waves import Waves

__all__ = ["COMPRESSED", "MERGED", "Pace", "check_combination", "encoding_lengths", "introductions"]

COMPRESSED = (Method.C_HSGD, Method.C_TDCD)
MERGED = (Method.TDCD, Method.C_TDCD)
# How often silent parties are asked who they are.
_QUESTIONS = 3


class Pace(NamedTuple):
    """Intervals and learning rate in use: eta of iteration t is eta0, halved every ``period`` > 0."""

    P: int
    Q: int
    eta0: float
    period: int

    def eta(self, t: int) -> float:
        """Return the learning rate of iteration t."""
        return halved_eta(t, eta0=self.eta0, period=self.period) if self.period else self.eta0


def introductions(federation: Federation, grid: Grid) -> dict[int, Introduction]:
    """Return what each node tells of itself, by partition id.

    Raises
    ------
    RosterError
        If a node gives no valid answer, however often it is asked.
    """
    waves = Waves(federation, 0)
    waiting = [node.partition_id for node in federation.gather(grid).nodes]
    content = RecordDict({"config": ConfigRecord({"seed": federation.settings.seed})})
    told: dict[int, Introduction] = {}
    timeout = min(federation.timeout, federation.settings.max_wait)
    for _ in range(_QUESTIONS):
        contents = [(partition, content) for partition in waiting if partition not in told]
        replies = waves.ask(grid, PAIR, contents, lambda _, content: introduction(content), timeout)
        told |= {reply.node.partition_id: reply.value for reply in replies}
        if len(told) == len(waiting):
            return told
    silent = [partition for partition in waiting if partition not in told]
    reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(waves.report.rejected.items()))
    raise RosterError(f"Partitions {silent[:5]} gave no valid answer to '{PAIR}' ({reasons}).")


def check_combination(
    method: Method, aggregate: bool, original_groups: int, raw: float, adaptive: Adaptive | None
) -> None:
    """Raise ValueError, naming the key, unless the settings go together."""
    if method is Method.JFL and not aggregate:
        raise ValueError("aggregate is False; valid is True in jfl, whose pairs last one round")
    if original_groups != 1 and not (method in MERGED and aggregate):
        raise ValueError(f"original_groups is {original_groups!r}; valid is 1 unless tdcd merges groups")
    if raw and method not in MERGED:
        raise ValueError(f"raw_bytes and raw_seconds are not 0; valid is 0 in {method}: no raw data moves")
    if adaptive is not None and not aggregate:
        raise ValueError("adaptive is set; valid is None with aggregate=False: the theory is of one model")


def encoding_lengths(parties: Mapping[int, Introduction]) -> tuple[int, int]:
    """Return e1 and e2; PairingError unless they are the same in all groups."""
    sides = []
    for at_hospital in (True, False):
        lengths = {one.encoding for one in parties.values() if (one.role == "hospital") is at_hospital}
        if len(lengths) != 1:
            raise PairingError(f"encodings have the lengths {sorted(lengths)}; valid is one length a side")
        sides.append(lengths.pop())
    return sides[0], sides[1]
