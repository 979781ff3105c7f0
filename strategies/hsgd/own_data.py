"""Set-up of an HSGD run on the parties' own data: matching people, pooling sums, sending the agreement.

The server holds no data. It learns hashes of ids, names of columns and classes, and sums of features: over
the people of a hospital or gateway, and masked sums over a group's devices.

Held-out people are evaluated from histograms of scores, because their halves are at different parties.
Devices send encodings, as in training. The hospital has the labels and the head, and reports the number of
people per class and score bin. The histograms of all hospitals give the curves. A person's score leaves the
hospital only if it is alone in its bin.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.exchange import (
    Group,
    PartyLinks,
    Schema,
    Share,
    Theta,
    records,
)
from hedgerow.strategies.hsgd.membership import (
    QUESTIONS,
    Conversation,
    Introduction,
    Matching,
    Members,
    PairingError,
    PartyForm,
    form_of,
    match,
)
from hedgerow.strategies.inbox import Reply, checked_metrics
from hedgerow.strategies.own_data import Moments, pooled
from hedgerow.strategies.whoami import grid_clock, raised_words
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.fixed_point import from_fixed_point, split, squared_deviations
from hedgerow.wire.message_types import ENCODE, POOL, SCORE, SETUP, UNMASK
from hedgerow.wire.parties import CALIBRATION_BINS, EVALUATED, INTRODUCTIONS
from hedgerow.wire.records import PayloadError, config_in, view

Build = Callable[[tuple[int, ...], tuple[int, ...], int], ArrayRecord]
# Nodes named in an error.
_MOST_NAMED = 5
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class OwnDataSetup:
    """How a run on the parties' own data is set up.

    Parameters
    ----------
    build : Callable[[hospital_shape, device_shape, num_classes], ArrayRecord]
        Returns the initial model.
    model : str
        Name of the model, from which nodes build the same architecture.
    standardise : {"federated", "none"} or tuple of two float (default: "federated")
        ``federated``: by mean and deviation over all training people, computed from sums. A tuple is the mean
        and deviation of every column. A node's own constants (node config ``constants``) take precedence.
    holdout : float (default: 0.2)
        Fraction of people that is held out for evaluation, in [0, 0.9].
    class_weights : "none", "balanced" or tuple of float (default: "none")
        Class weights in the loss, > 0; ``balanced`` is N / (C N_c), from the hospitals' counts.
    rematch_every : int (default: 0)
        Rounds between re-reading the files and matching people again, >= 0; 0 for never.
    specificity : float (default: 0.9)
        Specificity at which sensitivity is reported, in [0, 1].
    trained : Mapping or None (default: None)
        State of a trained strategy, ``HSGD.state_dict()``. Its model is evaluated on all matched people,
        without training.
    classes : tuple of str (default: empty)
        Class names in order; of two, the positive one last. Empty: the hospitals' class names, sorted. A
        hospital with any other class is excluded.
    """

    build: Build
    model: str
    standardise: str | tuple[float, float] = "federated"
    holdout: float = 0.2
    class_weights: str | tuple[float, ...] = "none"
    rematch_every: int = 0
    specificity: float = 0.9
    classes: tuple[str, ...] = ()
    trained: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.standardise, str):
            one_of("standardise", self.standardise, ("federated", "none"))
        elif not all(map(math.isfinite, self.standardise)) or self.standardise[1] <= 0:
            raise ValueError(f"standardise must be a mean and a deviation > 0, got {self.standardise!r}")
        in_range("holdout", self.holdout, 0.0, 0.9)
        int_at_least(0, rematch_every=self.rematch_every)
        in_range("specificity", self.specificity, 0.0, 1.0)
        if self.trained is not None and not (self.trained.get("parts") or {}).get("members", {}).get(
            "agreed"
        ):
            raise ValueError("trained must be the state of a run with own data, got one without")
        if self.classes and (len(self.classes) < 2 or len(set(self.classes)) < len(self.classes)):
            raise ValueError(f"classes must be at least 2 different names, or none, got {self.classes!r}")
        weights = self.class_weights
        if isinstance(weights, str):
            one_of("class_weights", weights, ("none", "balanced"))
        elif not weights or not all(math.isfinite(one) and one > 0 for one in weights):
            raise ValueError(f"class_weights must be a number > 0 for each class, got {weights!r}")


@dataclass(frozen=True)
class Agreed:
    """Settings fixed for the whole run, also for people who join later."""

    form: PartyForm  # Shapes, columns and classes.
    # Mean and deviation of each side's columns; empty: no standardisation.
    hospital: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    device: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    weights: tuple[float, ...] = ()  # Class weights; empty for 1 each.

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Agreed":
        """Restore the settings from a checkpoint's JSON values."""
        form = PartyForm(**{key: tuple(value) for key, value in state["form"].items()})
        sides = {key: (tuple(state[key][0]), tuple(state[key][1])) for key in ("hospital", "device")}
        return cls(form, **sides, weights=tuple(state["weights"]))


class OwnMembers(Members):
    """The groups of parties with their own data, from exchanges repeated for those that join or return."""

    own_files = True

    def __init__(self, own: OwnDataSetup, *options: Any) -> None:
        self.own, self.trains = own, own.trained is None
        super().__init__(*options)

    def forget(self) -> None:
        """Forget all parties."""
        super().forget()
        self.agreed: Agreed | None = None
        # By party: the people that its agreement covers.
        self._informed: dict[int, list[str]] = {}
        # Sealed labels by group and person.
        self._sealed: dict[tuple[int, str], bytes] = {}
        # Parties online at the last matching; None if people must be matched again.
        self._seen: set[int] | None = None
        self._complete: list[int] = []
        # The completed rounds when all files were last read.
        self._read_at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the agreement and the groups' sizes, for a checkpoint."""
        return {**super().state_dict(), "agreed": None if self.agreed is None else asdict(self.agreed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        super().load_state_dict(state)
        self.agreed = None if state["agreed"] is None else Agreed.restored(state["agreed"])

    def sizes_of(self, groups: Sequence[Group]) -> Mapping[int, int]:
        """Return the matched people of the groups, in their order."""
        return {at: group.size for at, group in enumerate(groups)}

    def initial_model(self, form: PartyForm) -> ArrayRecord:
        """Return the initial model."""
        return self.own.build(form.hospital_shape, form.device_shape, len(form.classes))

    def first_groups(self) -> Matching:
        """Wait for a complete group; pool sums, unless there is an agreement; send the agreement to all."""
        if self.own.trained is not None:
            self.agreed = Agreed.restored(self.own.trained["parts"]["members"]["agreed"])
        parties, form, matching = self._first_groups()
        found = self._pool(parties, matching, first=self.agreed is None)
        self.agreed = self.agreed or self._agree(form, found)
        self._send(parties, matching, self.agreed)
        matching = self._settled(parties, form)
        if not matching.groups:
            raise self._no_match()
        if not self.trains:
            matching.held_out = {group.number: group for group in matching.groups}
        self._read_at = self.federation.completed
        return matching

    def _first_groups(self) -> tuple[dict[int, Introduction], PartyForm, Matching]:
        now, sleep = grid_clock(self.parties.grid)
        end = now() + self.federation.settings.max_wait
        while True:
            self.parties.ask(self.parties.strangers(), QUESTIONS)
            parties = self.parties.there()
            form = form_of(parties, self.own.classes) if self.agreed is None else self.agreed.form
            complete = form is not None and len(form.classes) > 1
            found = self._match(parties, form) if form is not None and complete else None
            places, present = self.federation.members.places, len(self.parties.present())
            if (found is not None and found.groups) or places == present or now() >= end:
                break
            sleep(_POLL_SECONDS)
        self.counts = self.parties.left_out()
        if form is None:
            raise PairingError(f"no hospital, or no device or edge, is online ({self._lost()})")
        if found is None:
            raise PairingError(f"the hospitals must have at least 2 classes, got {list(form.classes)}")
        if not found.groups:
            self.counts += found.counts
            raise self._no_match()
        return parties, form, found

    def _no_match(self) -> PairingError:
        return PairingError(f"no hospital has a person in common with a device or edge ({self._lost()})")

    def refresh(self, raised: Collection[int]) -> Matching | None:
        """Return the groups of the parties that are online; None if nothing changed.

        Without a complete group, waits for one as long as a run waits for its first, then returns no groups.
        """
        now, sleep = grid_clock(self.parties.grid)
        end = now() + min(self.federation.timeout, self.federation.settings.max_wait)
        for i in raised:
            self.parties.leave_out(i, "left-out-not-ready", soon=True)
        completed = self.federation.completed
        if 0 < self.own.rematch_every <= completed - self._read_at:
            self._read_at, self._sealed = completed, {}
            self._reintroduced(self.parties.ask(self.parties.present(), 1))
        matching: Matching | None = None
        while True:
            if strangers := self.parties.strangers():
                self._reintroduced(self.parties.ask(strangers, 1))
            parties = self.parties.there()
            if self._seen is None or self._seen != parties.keys():
                matching = self._matched_again(parties)
            complete = bool(self._complete) if matching is None else bool(matching.groups)
            if complete or now() >= end:
                break
            sleep(_POLL_SECONDS)
        roster = self.federation.gather(self.parties.grid)
        places = len(roster)
        if self.federation.members.places is None:  # Places that were never taken are not missed.
            places = sum(not node.vacant for node in roster.nodes)
        self.away = places - len(roster.online)
        return matching

    def _reintroduced(self, partitions: Collection[int]) -> None:
        """Note new introductions: these parties may have lost the agreement."""
        self._informed = {i: people for i, people in self._informed.items() if i not in partitions}
        self._seen = None

    def _matched_again(self, parties: Mapping[int, Introduction]) -> Matching:
        agreed = self.agreed
        assert agreed is not None, "the run has begun"
        found = self._match(parties, agreed.form)
        if lacking := self._uninformed(found):
            self._pool(parties, found, first=False, only=lacking)
            self._send(parties, found, agreed, only=lacking)
        return self._settled(parties, agreed.form)

    def _settled(self, parties: Mapping[int, Introduction], form: PartyForm) -> Matching:
        """Return the groups of the parties that have the agreement and are ready."""
        found = self._match(parties, form)
        self._seen = set(parties)
        if self._uninformed(found):
            # A party that fails must not make room for one without the agreement.
            found = self._match({i: one for i, one in parties.items() if i in self._informed}, form)
            self._seen = None
        self._complete = [group.number for group in found.groups]
        self._standing |= found.standing
        self.counts = found.counts + self.parties.left_out()
        for reason, number in sorted(self.counts.items()):
            if number and reason != "matched":
                log(WARNING, "Own data: %s: %d", reason, number)
        return found

    def _uninformed(self, found: Matching) -> set[int]:
        """Return the parties whose agreement does not cover all their people."""
        return {i for i, people in found.partitions.items() if set(people) - set(self._informed.get(i, ()))}

    def _lost(self) -> str:
        reasons = [f"{number} x {reason}" for reason, number in sorted(self.counts.items())]
        return ", ".join(reasons) or "none came"

    def _match(self, parties: Mapping[int, Introduction], form: PartyForm) -> Matching:
        return match(
            parties, form, holdout=self.own.holdout if self.trains else 0.0,
            seed=self.federation.settings.seed, num_groups=self.num_groups, standing=self._standing,
        )  # fmt: skip

    # Sums.

    def _pool(
        self,
        parties: Mapping[int, Introduction],
        matching: Matching,
        *,
        first: bool,
        only: Collection[int] | None = None,
    ) -> dict[str, Any]:
        """Return pooled sums; store sealed labels for the unlabelled parties (of ``only``, if given)."""
        sums = first and self.own.standardise == "federated"
        counts = first and self.own.class_weights == "balanced"
        form, standing = matching.form, matching.standing
        contents: list[tuple[int, RecordDict]] = []
        unlabelled: dict[int, list[str]] = {}
        asked: dict[int, Group] = {}
        for group in matching.groups:
            m, node_of = group.number, standing[group.number].node_of
            lacking = unlabelled[m] = [
                person
                for person in standing[m].ids
                if not parties[node_of[person]].labelled
                and (only is None or node_of[person] in only)
                and (m, person) not in self._sealed
            ]
            asked |= dict.fromkeys(group.partitions, group)
            if sums or counts or lacking:
                more = {"classes": list(form.classes), "counts": counts, "labels-of": lacking}
                question = self._question(form.hospital_features, sums, list(group.ids), **more)
                contents.append((group.hospital, question))
            for i in sorted(set(group.node_of.values())) if sums else ():
                contents.append((i, self._question(form.device_features, True, group.people_at(i))))
        if not contents:
            return {}
        widths = form.hospital_shape[-1], form.device_shape[-1]

        def check(partition: int, content: RecordDict) -> dict[str, Any]:
            group, one = asked[partition], parties[partition]
            hospital = one.role == "hospital"
            return _pooled(
                content, widths[not hospital], one.role, sums,
                len(form.classes) if hospital and counts else 0,
                len(unlabelled[group.number]) if hospital else 0,
            )  # fmt: skip

        talk = Conversation(self.federation, self.parties.grid)
        replies = {r.node.partition_id: r.value for r in talk.ask(POOL, contents, check)}
        for group in matching.groups:
            labels = replies.get(group.hospital, {}).get("labels", [])
            people = [(group.number, person) for person in unlabelled[group.number]]
            self._sealed |= dict(zip(people, labels, strict=bool(labels)))
        found: dict[str, Any] = {"hospital": [], "device": []}
        found["counts"] = np.zeros(len(form.classes))
        for partition, value in sorted(replies.items()):
            if "counts" in value:
                found["counts"] = found["counts"] + value["counts"]
            if "sum" in value:
                side = "hospital" if parties[partition].role == "hospital" else "device"
                found[side].append((value["rows"], value["sum"] / value["rows"], value["deviations"]))
        if sums:
            self._check_pooled(talk, {partition for partition, _ in contents} - replies.keys())
            self._unmask(talk, matching, replies, widths[1], found["device"])
        return found

    def _check_pooled(self, talk: Conversation, silent: Collection[int]) -> None:
        """Raise PairingError if a party refused its sums; name those that sent none to the log.

        Only who joins later is standardised by sums of others.
        """
        if not silent:
            return
        nodes = self.federation.gather(self.parties.grid).nodes
        errors = talk.report.errors
        refused = [
            f"{nodes[i].name}: {raised_words(errors[i].reason or '')}" for i in sorted(silent & errors.keys())
        ]
        if refused:
            raise PairingError(
                "standardise = 'federated' needs the sums of every party that trains with them, and "
                f"{len(refused)} refused ({'; '.join(refused[:_MOST_NAMED])}). A node's owner may change "
                "the key that the reason names; or use constants, standardise = '0.13,0.31', or 'none'"
            )
        names = ", ".join(str(nodes[i].name) for i in sorted(silent))
        log(WARNING, "Own data: standardised by sums that do not include those of %s", names)

    def _question(self, features: Sequence[str], sums: bool, ids: list[str], **more: Any) -> RecordDict:
        config = {"ids": ids, "features": list(features), "sums": sums, **more, **self._flag}
        return RecordDict({"config": ConfigRecord(config)})

    @property
    def _flag(self) -> dict[str, bool]:
        """The key of every config when links are sealed."""
        return {"sealed": True} if self.sealed else {}

    def _unmask(
        self,
        talk: Conversation,
        matching: Matching,
        replies: Mapping[int, Any],
        width: int,
        into: list[Moments],
    ) -> None:
        """Add the moments of masked sums of groups' devices; the hospitals send the sums of the masks."""
        contents, masked = [], {}
        for group in matching.groups:
            there = [(p, replies[i]) for p in group.ids if "seed" in replies.get(i := group.node_of[p], {})]
            if not there:
                continue
            config: dict[str, Any] = {"ids": [p for p, _ in there], "seeds": [v["seed"] for _, v in there]}
            config |= {"numbers": 2 * width, **self._flag}
            contents.append((group.hospital, RecordDict({"config": ConfigRecord(config)})))
            masked[group.hospital] = [value for _, value in there]
        if not contents:
            return

        def check(partition: int, content: RecordDict) -> list[int]:
            return _numbers(config_in(content, "masks").get("sum"), 2 * width)

        for reply in talk.ask(UNMASK, contents, check):
            values = masked[reply.node.partition_id]
            total = [-mask for mask in reply.value]
            for value in values:
                total = [a + b for a, b in zip(total, value["masked"], strict=True)]
            rows = int(sum(value["rows"] for value in values))
            mean = np.array([from_fixed_point(number) for number in total[:width]]) / rows
            sums = zip(total[:width], total[width:], strict=True)
            into.append((rows, mean, np.array([squared_deviations(s, q, rows) for s, q in sums])))

    def _agree(self, form: PartyForm, found: Mapping[str, Any]) -> Agreed:
        weights = self.own.class_weights
        if weights == "balanced":
            counts = found["counts"]
            if not counts.all():
                raise PairingError(
                    "class_weights must not be 'balanced' unless each class has a person, got "
                    f"{counts.tolist()} people of the classes {list(form.classes)}"
                )
            weights = tuple((counts.sum() / (len(counts) * counts)).tolist())
        elif weights == "none":
            weights = ()
        elif len(weights) != len(form.classes):
            raise PairingError(
                f"class_weights must have one number for each of {list(form.classes)}, got {len(weights)}"
            )
        assert not isinstance(weights, str)
        if self.own.standardise == "none":
            return Agreed(form, weights=weights)
        if not isinstance(self.own.standardise, str):
            mean, deviation = self.own.standardise
            widths = form.hospital_shape[-1], form.device_shape[-1]
            hospital, device = (((mean,) * width, (deviation,) * width) for width in widths)
            return Agreed(form, hospital, device, weights)
        for side in ("hospital", "device"):
            if not found[side]:
                raise PairingError(
                    f"no {side} reported sums of its features, which cover at least min-people people of a "
                    "node: take more people, a smaller min-people in node configs, or standardise 'none'"
                )
        hospital, device = (
            (tuple(mean.tolist()), tuple(deviation.tolist()))
            for mean, deviation in (pooled(found[side]) for side in ("hospital", "device"))
        )
        return Agreed(form, hospital, device, weights)

    # Sending the agreement.

    def _send(
        self,
        parties: Mapping[int, Introduction],
        matching: Matching,
        agreed: Agreed,
        only: Collection[int] | None = None,
    ) -> None:
        """Send the agreement to parties (of ``only``, if given); exclude those that are not ready."""
        form = agreed.form
        common: dict[str, Any] = {
            "model": self.own.model,
            "seed": self.federation.settings.seed,
            "hospital-shape": list(form.hospital_shape),
            "device-shape": list(form.device_shape),
            "classes": list(form.classes),
            "weights": list(agreed.weights),
        }
        contents, sent = [], {}
        asked = {i: people for i, people in matching.partitions.items() if only is None or i in only}
        for partition, now in asked.items():
            one = parties[partition]
            # Also those whose other party is away: when it returns, this one needs no new agreement.
            more = set(one.ids) - set(now)
            people = [*now, *(person for person in self._informed.get(partition, ()) if person in more)]
            hospital = one.role == "hospital"
            mean, deviation = agreed.hospital if hospital else agreed.device
            features = form.hospital_features if hospital else form.device_features
            side: dict[str, Any] = {
                "features": list(features), "mean": list(mean), "deviation": list(deviation)
            }  # fmt: skip
            labels = []
            if not one.labelled:
                labels = [self._sealed[one.group, p] for p in people if (one.group, p) in self._sealed]
                if len(labels) < len(people):
                    continue
            config = ConfigRecord({**common, **side, "people": people, "labels": labels, **self._flag})
            contents.append((partition, RecordDict({"config": config})))
            sent[partition] = people

        def check(_: int, content: RecordDict) -> int:
            encoding = config_in(content, "ready").get("encoding")
            if not isinstance(encoding, int) or isinstance(encoding, bool) or encoding < 1:
                raise PayloadError("bad setup", f"encoding={encoding!r}, expected an integer >= 1")
            return encoding

        talk = Conversation(self.federation, self.parties.grid)
        replies = talk.ask(SETUP, contents, check)
        if only is None:
            self.encodings = self._lengths(parties, replies, len(asked))
        lengths = {reply.node.partition_id: reply.value for reply in replies}
        ready = {i for i, e in lengths.items() if e == self.encodings[parties[i].role != "hospital"]}
        self._informed |= {i: sent[i] for i in ready}
        self.parties.settled(ready)
        for i in asked.keys() - ready:
            self._informed.pop(i, None)
            self.parties.leave_out(i, "left-out-not-ready")

    def _lengths(
        self, parties: Mapping[int, Introduction], replies: Sequence[Reply], asked: int
    ) -> tuple[int, int]:
        """Return e1 and e2, by majority of each side."""
        lengths = []
        for side, hospital in (("hospital", True), ("device or edge", False)):
            own = [r.value for r in replies if (parties[r.node.partition_id].role == "hospital") is hospital]
            if not own:
                self.counts["left-out-not-ready"] += asked - len(replies)
                raise PairingError(f"no {side} is ready ({self._lost()})")
            lengths.append(Counter(own).most_common(1)[0][0])
        return lengths[0], lengths[1]


def _pooled(
    content: RecordDict, width: int, role: str, sums: bool, classes: int, sealed: int
) -> dict[str, Any]:
    """Return a node's valid reply to ``query.pool``; PayloadError otherwise."""
    out: dict[str, Any] = {}
    if role == "device":
        masked = config_in(content, "masked")
        seed, rows = masked.get("seed"), masked.get("rows")
        short = isinstance(seed, bytes) and len(seed) <= 256
        if not short or not isinstance(rows, int) or not 0 < rows < 2**31:
            raise PayloadError("bad sums", "no sealed seed, or no number of values")
        return {"masked": _numbers(masked.get("sums"), 2 * width), "seed": seed, "rows": float(rows)}
    arrays = content.array_records.get("arrays", ArrayRecord())
    shapes = {"sum": (width,), "deviations": (width,), "rows": (1,)} if sums else {}
    for key, shape in {**shapes, **({"counts": (classes,)} if classes else {})}.items():
        value = view(arrays[key]) if key in arrays else None
        if value is None or value.shape != shape or value.dtype != np.float64 or not np.isfinite(value).all():
            raise PayloadError("bad sums", f"{key!r} is missing, or not finite float64 of shape {shape}")
        if key != "sum" and value.min() < 0:
            raise PayloadError("bad sums", f"{key!r} has numbers < 0")
        out[key] = float(value[0]) if key == "rows" else value
    if sums and not out["rows"] >= 1:
        raise PayloadError("bad sums", "no values")
    if sealed:
        labels = config_in(content, "sealed").get("labels")
        if not isinstance(labels, list) or len(labels) != sealed:
            raise PayloadError("bad sums", f"sealed labels are not {sealed}")
        if not all(isinstance(label, bytes) and len(label) <= 256 for label in labels):
            raise PayloadError("bad sums", "sealed labels are no short bytes")
        out["labels"] = labels
    return out


def _numbers(coded: Any, count: int) -> list[int]:
    if not isinstance(coded, bytes):
        raise PayloadError("bad sums", "no masked sums")
    try:
        return split(coded, count)
    except ValueError as error:
        raise PayloadError("bad sums", str(error)) from error


# Held-out people.

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
            content, refused = links.refused_in(content, [hospitals[i]])
            links.introductions.confirm(i, [hospitals[i]], refused)
        return schema.device_exchange(content, len(asked[i]), EVALUATED)

    shares = {one.node.partition_id: one.value for one in talk.ask(ENCODE, contents, check)}
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
            content, refused = links.refused_in(content, nodes_of[i])
            count -= sum(len(asked[node]) for node in refused)
            links.introductions.confirm(i, nodes_of[i], refused)
            links.unopened.update(refused.values())
        return _scores(content, count)

    answers = talk.ask(SCORE, contents, check_scores)
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
    about = ConfigRecord({**config, **links.config, "peers": [links.names[j] for j in peers]})
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
