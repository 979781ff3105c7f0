"""Which neighbours were introduced to each other, where what they tell each other is sealed.

The relay hands introductions on and cannot use them: public keys. Sender and receiver of a payload that are
new to each other are told each other's introduction beside it, the sender when it is asked to publish, the
receiver with the payload, until the receiver has answered that it could read it.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import RecordDict

from hedgerow.wire.records import PayloadError, config_in
from hedgerow.wire.sealed import INTRODUCTION_BYTES, REASONS

__all__ = ["Introductions", "introduction_in", "refused_in"]


def introduction_in(content: RecordDict) -> tuple[bytes, bool]:
    """Return a node's introduction, of its answer to a hello, and whether it pins its neighbours' keys."""
    told = config_in(content, "hello")
    introduction = told.get("introduction")
    if not isinstance(introduction, bytes) or len(introduction) != INTRODUCTION_BYTES:
        raise PayloadError("no sealing", f"the node told no introduction of {INTRODUCTION_BYTES} bytes")
    return introduction, told.get("pinned") is True


def refused_in(content: RecordDict, senders: Iterable[int]) -> dict[str, list[int]]:
    """Return which of the senders' payloads a receiver refused, by reason; nothing else that it may tell."""
    told, sent = config_in(content, "refused"), set(senders)
    refused = {}
    for reason in REASONS:
        named = told.get(reason)
        if isinstance(named, list) and (those := sorted(sent.intersection(named))):
            refused[reason] = those
    return refused


class Introductions:
    """The introductions of a run, by partition id.

    Nodes that are ``pinning`` their neighbours' keys trust no others; the rest trust the first that they are
    told.
    """

    def __init__(self) -> None:
        self.of: dict[int, bytes] = {}
        self.pinning: set[int] = set()
        self._run: int | None = None
        # (sender, receiver) of payloads that the receiver could read.
        self._known: set[tuple[int, int]] = set()

    def begin(self, run: int) -> None:
        """Begin a run, or one that goes on: under another id all nodes have other keys."""
        if run != self._run:
            self.__init__()  # type: ignore[misc]
            self._run = run

    def take(self, i: int, introduction: bytes, pinning: bool) -> None:
        """Take a node's own introduction; one that is new begins all its links anew."""
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
        """Note that a receiver read its senders' payloads but the refused, whose links begin anew."""
        self._known |= {(j, i) for j in senders}
        self._known -= {(j, i) for j in refused}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint: nothing here is secret."""
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
