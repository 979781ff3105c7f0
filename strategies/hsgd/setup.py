"""Who HSGD's parties are, which it settles before its first round.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the baselines of the experiments.
"""

from collections.abc import Mapping

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import RosterError
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.groups import PairingError
from hedgerow.strategies.hsgd.messages import Introduction, introduction
from hedgerow.strategies.hsgd.waves import Waves
from hedgerow.wire.message_types import PAIR

__all__ = ["encoding_lengths", "introductions", "question"]

# How often silent parties are asked who they are.
_QUESTIONS = 3


def question(federation: Federation, sealed: bool) -> ConfigRecord:
    """Return the config of ``query.pair``."""
    return ConfigRecord({"seed": federation.settings.seed, **({"sealed": True} if sealed else {})})


def introductions(federation: Federation, grid: Grid, sealed: bool = False) -> dict[int, Introduction]:
    """Return what each node tells of itself, by partition id; ``sealed`` asks for keys of its links too.

    Raises
    ------
    RosterError
        If a node gives no valid answer, however often it is asked.
    """
    waves = Waves(federation, 0, booked=False)
    waiting = [node.partition_id for node in federation.gather(grid).nodes]
    content = RecordDict({"config": question(federation, sealed)})
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


def encoding_lengths(parties: Mapping[int, Introduction]) -> tuple[int, int]:
    """Return e1 and e2; PairingError unless they are the same in all groups."""
    sides = []
    for at_hospital in (True, False):
        lengths = {one.encoding for one in parties.values() if (one.role == "hospital") is at_hospital}
        if len(lengths) != 1:
            raise PairingError(f"encodings have the lengths {sorted(lengths)}; valid is one length a side")
        sides.append(lengths.pop())
    return sides[0], sides[1]
