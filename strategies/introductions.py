"""The exchange of public keys (introductions) between neighbours that send each other sealed payloads.

The relay forwards introductions; as public keys they do not let it read payloads. A new pair of sender and
receiver gets each other's introduction, the sender with the request to publish, the receiver with the
payload, until the receiver has confirmed that it could read a payload.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

from flwr.app import RecordDict
from flwr.common import log

from hedgerow.wire.records import PayloadError, config_in
from hedgerow.wire.sealed import INTRODUCTION_BYTES, REASONS


def introduction_in(content: RecordDict) -> tuple[bytes, bool]:
    """Return the introduction in a node's answer to a hello, and whether it pins its neighbours' keys."""
    hello = config_in(content, "hello")
    introduction = hello.get("introduction")
    if not isinstance(introduction, bytes) or len(introduction) != INTRODUCTION_BYTES:
        raise PayloadError("no sealing", f"the node sent no introduction of {INTRODUCTION_BYTES} bytes")
    return introduction, hello.get("pinned") is True


def refused_in(content: RecordDict, senders: Iterable[int]) -> dict[str, list[int]]:
    """Return which of the senders' payloads a receiver refused, by reason; ignore unknown reasons."""
    reported, sent = config_in(content, "refused"), set(senders)
    refused = {}
    for reason in REASONS:
        named = reported.get(reason)
        if isinstance(named, list) and (those := sorted(sent.intersection(named))):
            refused[reason] = those
    return refused


class Introductions:
    """A run's introductions, by partition id; ``pinning`` nodes trust only pinned keys, others the first."""

    def __init__(self) -> None:
        self.of: dict[int, bytes] = {}
        self.pinning: set[int] = set()
        self._run: int | None = None
        # (sender, receiver) of payloads that the receiver could read.
        self._known: set[tuple[int, int]] = set()

    def begin(self, run: int) -> None:
        """Begin or resume a run; a run with another id has new keys."""
        if run != self._run:
            self.__init__()  # type: ignore[misc]
            self._run = run

    def take(self, i: int, introduction: bytes, pinning: bool) -> None:
        """Store a node's introduction; a new one resets all its links."""
        if self.of.get(i) != introduction:
            self._known = {pair for pair in self._known if i not in pair}
        self.of[i] = introduction
        (self.pinning.add if pinning else self.pinning.discard)(i)

    def for_sender(self, j: int, receivers: Sequence[int]) -> dict[int, bytes]:
        """Return the introductions that a sender needs, by receiver."""
        return {i: self.of[i] for i in receivers if (j, i) not in self._known and i in self.of}

    def for_receiver(self, i: int, senders: Iterable[int]) -> dict[int, bytes]:
        """Return the introductions that a receiver needs, by sender."""
        return {j: self.of[j] for j in senders if (j, i) not in self._known and j in self.of}

    def confirm(self, i: int, senders: Iterable[int], refused: Iterable[int]) -> None:
        """Record that a receiver read its senders' payloads; the links to the refused ones are reset."""
        self._known |= {(j, i) for j in senders}
        self._known -= {(j, i) for j in refused}

    def log(self) -> None:
        """Log how many nodes pin their peers' keys."""
        log(INFO, "Links are sealed: %d of %d nodes pin their peers' keys, the others trust the first key",
            len(self.pinning), len(self.of))  # fmt: skip
        log(INFO, "that they get.")

    def metrics(self, withheld: int, unopened: Mapping[str, int]) -> dict[str, int]:
        """Return a round's metrics: nodes that pin keys, payloads that senders withheld, and refused ones."""
        by_reason = {f"unopened-{why.replace(' ', '-')}": n for why, n in sorted(unopened.items())}
        counts = {"pinning": len(self.pinning), "withheld": withheld, "unopened": sum(unopened.values())}
        return {**counts, **by_reason}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; it holds no secrets."""
        return {
            "run": self._run,
            "of": {str(i): base64.b64encode(one).decode() for i, one in sorted(self.of.items())},
            "pinning": sorted(self.pinning),
            "known": sorted(map(list, self._known)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._run = state["run"]
        self.of = {int(i): base64.b64decode(one) for i, one in state["of"].items()}
        self.pinning = set(state["pinning"])
        self._known = {(int(j), int(i)) for j, i in state["known"]}
