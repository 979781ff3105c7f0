"""Any Strategy with compressed uplinks and error feedback.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Algorithm 2, step 5: the server adds what came, x^k + Q(m), and needs its own copy
of x^k. What differs: each reply is turned back into the model that it stands for before the wrapped strategy
sees it, so that any rule of aggregation goes on as it was.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    MultiKrum,
    Result,
    Strategy,
)
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport, checked_metrics
from hedgerow.strategies.parts.compression import CompressedChanges, ErrorFeedback
from hedgerow.strategies.rounds import TooFewRepliesError
from hedgerow.strategies.strategy import check_options
from hedgerow.strategies.wrappers import chain, is_flowers, outer_strategies
from hedgerow.wire.compress import (
    UNSOUND,
    Compressor,
    Identity,
    Ternary,
    TopK,
    compressed_part,
    parse_compressor,
    promoted,
    record_payload,
)
from hedgerow.wire.records import (
    Layout,
    PayloadError,
    decoded_record,
    nominal_bits,
    payload_bytes,
    to_record,
    view,
)

__all__ = ["Compressed"]

_UPDATE = "update"
# Flower's codes: an unknown error, a mod that is not given what it needs.
_ERROR, _MOD_FAILED = 0, 6
_NOT_COMPRESSED = "not compressed"
# They compare what nodes tell entry by entry, or node by node. Krum is a MultiKrum.
_ROBUST = (Bulyan, FedMedian, FedTrimmedAvg, MultiKrum)
# Their models are trees, as bytes.
_TREES = (FedXgbBagging, FedXgbCyclic)
_CLIENT_PRIVACY = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


class Compressed(Strategy):
    """A Strategy whose nodes send compressed updates.

    **The ClientApp must compress: this suite's do, any other whose replies to ``train`` hold one ArrayRecord
    and one MetricRecord as ``ClientApp(mods=[compress_reply])``.** What it is asked for stands in each
    message's config: ``compressor``, ``error-feedback``, ``round-index`` (the
    round, from 0) and ``acknowledged`` (the ``round-index`` of the node's last update that was absorbed, or
    -1).

    Parameters
    ----------
    strategy : Strategy
        Flower's own, this suite's, or any other whose ``start`` does not call ``super().start``. Whatever is
        not named here is read from it and written to it.
    compressor : str or Compressor (default: "topk(0.01)")
        As ``parse_compressor`` reads it. With ``identity`` replies are dense, and only checked and counted.
        A median, a trimmed mean, Krum and Bulyan take ``sign``, or ``randk(0.1)``, the same entries at all
        nodes. An entry waits ten rounds for its turn in ``randk(0.1)`` and then comes tenfold, so that local
        steps must be smaller than without compression: a tenth is safe.
    error_feedback : bool (default: True)
        Nodes keep what compression drops, and add it to their next message.

    Raises
    ------
    ValueError
        If the compressor is none; if the strategy's models are trees; if the compressor lets each node choose
        which entries it tells, and the strategy is a robust one, which takes the zeros of the others for what
        most nodes want; if the strategy has nodes clip their updates and ``error_feedback`` adds to them
        afterwards; at the first round, if a strategy of differential privacy is around this one rather than
        inside it.
    TooFewRepliesError
        After the first round, if no node's reply is an update, as without the mod, or with it behind others.

    Notes
    -----
    - Running statistics and integers of a state dict travel as they are, beside the update.
    - A reply that is no update of the model that was sent, or whose metrics are not finite, is handed on as
      an error, which every Strategy counts as a lost reply, and is counted by reason in ``report``.
    - An update counts as absorbed if the round gave a model and the wrapped strategy took it: by the
      ``report`` of what it accepts, or, of Flower's, if its metrics were aggregated, which Krum and Bulyan do
      of the replies that they select. A node whose update was not absorbed takes it back.
    """

    strategy: Strategy
    uplink: "Uplink"

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an option that the class does not take."""
        check_options(cls, options)
        return super().__new__(cls)

    def __init__(
        self, strategy: Strategy, compressor: str | Compressor = "topk(0.01)", error_feedback: bool = True
    ) -> None:
        self.strategy = strategy
        self.uplink = Uplink(ErrorFeedback(parse_compressor(str(compressor)), error_feedback))
        self._check_composition()

    def __getattr__(self, name: str) -> Any:
        """Return what only the wrapped strategy has."""
        if name in Compressed.__annotations__ or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is the wrapped strategy's there: its ``start`` runs with this object as its self."""
        if name in Compressed.__annotations__:
            super().__setattr__(name, value)
        else:
            setattr(self.strategy, name, value)

    @property
    def uplink_bits(self) -> int:
        """The paper's bits of all updates since the start that decoded."""
        return self.uplink.bits

    @property
    def uplink_payload_bytes(self) -> int:
        """Their bytes, as they were serialised."""
        return self.uplink.payload_bytes

    @property
    def dense_uplink_bits(self) -> int:
        """What ``uplink_bits`` would be had the models travelled that the updates stand for."""
        return self.uplink.dense_bits

    @property
    def dense_uplink_payload_bytes(self) -> int:
        """What ``uplink_payload_bytes`` would be had those models travelled."""
        return self.uplink.dense_payload_bytes

    @property
    def report(self) -> ExchangeReport:
        """What the last training exchange sent, got and lost, updates that did not decode by reason."""
        own, theirs = self.uplink.report, self._their_report()
        if theirs is None:
            return own
        errors = Counter({f"error {_ERROR}": self.uplink.replaced})
        lost = self.uplink.undecoded
        return ExchangeReport(theirs.sent, theirs.accepted, theirs.rejected - errors + lost)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **more: Any,
    ) -> Result:
        """Run the wrapped strategy's ``start``; its rounds come through here. ``more`` is its own."""
        run: Any = type(self.strategy).start
        # By name: what records a run finds them so.
        result: Result = run(
            self,
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
            **more,
        )
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the wrapped strategy write its messages, and ask in each for a compressed reply."""
        if server_round == 1 and self.uplink.feedback.acknowledged:
            self.uplink.feedback.forget()
            self.uplink = Uplink(self.uplink.feedback)
        if server_round == 1:
            for caller in filter(is_flowers, outer_strategies(self)):
                name = type(caller).__name__
                raise ValueError(
                    f"strategy of {name} must not be Compressed, whose updates are still coded when {name} "
                    f"sees them: write Compressed({name}(...)), which decodes them first"
                )
        # Told now what nodes are asked for, the strategy books messages as large as they will be.
        config = ConfigRecord({**config, **self.uplink.feedback.asked(server_round - 1), "acknowledged": -1})
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        return self.uplink.ask(server_round - 1, messages, _partition_ids(self.strategy))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies as they arrive, and let the wrapped strategy aggregate them."""
        with self._selection(), closing(self._decoded(replies)) as decoded:
            models = list(decoded) if isinstance(replies, list) else decoded
            arrays, metrics = self.strategy.aggregate_train(server_round, models)
        if not self.uplink.bits:
            self.uplink.explain(server_round)
        if arrays is not None:
            self.uplink.acknowledge(server_round - 1)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy's."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy's."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Compressed uplinks of %s:", type(self.strategy).__name__)
        log(INFO, "\t│\t├── Compressor: %s", self.uplink.feedback.compressor)
        log(INFO, "\t│\t└── Error feedback: %s", self.uplink.feedback.error_feedback)
        self.strategy.summary()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped strategy's state, the acknowledgements and the traffic, for a checkpoint.

        Raises
        ------
        AttributeError
            If the wrapped strategy has no ``state_dict``, as Flower's have not.
        """
        theirs: Any = self.strategy
        return {"strategy": theirs.state_dict(), "uplink": self.uplink.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        theirs: Any = self.strategy
        theirs.load_state_dict(state["strategy"])
        self.uplink.load_state_dict(state["uplink"])

    def _check_composition(self) -> None:
        compressor = self.uplink.feedback.compressor
        sparse = isinstance(compressor, Ternary) or (
            isinstance(compressor, TopK) and compressor.fraction != 1
        )
        for inner in chain(self.strategy):
            if isinstance(inner, _TREES):
                raise ValueError(
                    f"strategy must be one of floating-point models, got {type(inner).__name__}: its nodes "
                    "send trees as bytes, which cannot be compressed"
                )
            if getattr(inner, "sums", None) is not None:
                raise ValueError(
                    f"strategy must have no secure_sum, got {type(inner).__name__} with one: masked values "
                    "cannot be compressed; SimilarityFree has 'randk(0.1)' within its sums"
                )
            if sparse and isinstance(inner, _ROBUST):
                raise ValueError(
                    "compressor must be 'sign', 'identity', or 'randk(0.1)' with smaller local steps for "
                    f"{type(inner).__name__}, got {str(compressor)!r}: if each node selects its own "
                    "entries, most nodes send nothing for any one entry, so a median, a trimmed mean or Krum "
                    "concludes that most want no change"
                )
            private = isinstance(inner, _CLIENT_PRIVACY) and compressor != Identity()
            if private and self.uplink.feedback.error_feedback:
                raise ValueError(f"strategy is {type(inner).__name__}: {UNSOUND}")

    @contextmanager
    def _selection(self) -> Iterator[None]:
        """Note which replies a strategy of Flower's makes its model of, where it has its own choice."""
        owner = next((s for s in chain(self.strategy) if "train_metrics_aggr_fn" in vars(s)), None)
        if owner is None:
            yield
            return
        theirs: Any = owner
        aggregate = theirs.train_metrics_aggr_fn

        def noting(contents: list[RecordDict], *arguments: Any) -> Any:
            self.uplink.select(contents)
            return aggregate(contents, *arguments)

        theirs.train_metrics_aggr_fn = noting
        self.uplink.contents = {}
        try:
            yield
        finally:
            theirs.train_metrics_aggr_fn = aggregate
            self.uplink.contents = None

    def _decoded(self, replies: Iterable[Message]) -> Generator[Message, None, None]:
        """Yield what the wrapped strategy is to see; note which updates it takes."""
        # A setting of Flower's strategies, or of this suite's.
        owners = self.strategy, getattr(self.strategy, "settings", None)
        keys = (getattr(owner, "weighted_by_key", None) for owner in owners)
        key = next(filter(None, keys), "num-examples")
        for reply in replies:
            model = self.uplink.decoded(reply, key)
            if model is None:
                continue
            before = self._their_report()
            accepted = -1 if before is None else before.accepted
            try:
                yield model
            finally:  # Also where the strategy has heard enough and asks for no other.
                after = self._their_report()
                if model.has_content() and (after is None or after.accepted > accepted):
                    self.uplink.absorb(model)

    def _their_report(self) -> ExchangeReport | None:
        report = getattr(self.strategy, "report", None)
        return report if isinstance(report, ExchangeReport) else None


@dataclass(frozen=True)
class _Sent:
    """The model x^k that a node was sent: its layout, and the vector (d,) of its compressed keys."""

    layout: Layout
    vector: NDArray[Any]

    @classmethod
    def of(cls, arrays: ArrayRecord) -> "_Sent":
        layout = Layout.of(arrays)
        part = compressed_part(layout)
        compressed = to_record({key: view(arrays[key]) for key in part.keys})
        return cls(layout, part.flatten(compressed, np.result_type(np.float32, *part.dtypes)))


@dataclass
class Uplink:
    """What is asked of the nodes, what of it came, and what of that was absorbed."""

    # By partition id where the wrapped strategy knows them: node ids do not outlive a run.
    feedback: ErrorFeedback
    bits: int = 0
    payload_bytes: int = 0
    dense_bits: int = 0
    dense_payload_bytes: int = 0
    # Of the exchange at hand.
    absorbed: set[int] = field(default_factory=set)
    undecoded: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    # By node, where the strategy selects: it holds all of them itself. Elsewhere replies are not kept.
    contents: dict[int, RecordDict] | None = None
    _reasons: list[str] = field(default_factory=list)
    _errors: Counter[str] = field(default_factory=Counter)
    _asked: dict[int, Message] = field(default_factory=dict)
    _waiting: set[int] = field(default_factory=set)
    _partition_ids: Mapping[int, int] = field(default_factory=dict)
    _models: dict[int, _Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._coding = self.feedback.coding(0)

    def ask(
        self, round_index: int, messages: list[Message], partition_ids: Mapping[int, int]
    ) -> list[Message]:
        """Write into each message's config what its node is asked for; equal contents stay one object."""
        self._partition_ids = partition_ids
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        self._waiting = set(self._asked)
        self.absorbed, self.undecoded, self._errors, self.replaced = set(), Counter(), Counter(), 0
        self._models, self._reasons = {}, []
        self._coding = self.feedback.coding(round_index)
        contents: dict[tuple[int, int], RecordDict] = {}
        originals = [message.content for message in messages]
        for message, content in zip(messages, originals, strict=True):
            acknowledged = self.feedback.acknowledged.get(self._key(message.metadata.dst_node_id), -1)
            shared = id(content), acknowledged
            if shared not in contents:
                contents[shared] = self._asking(content, round_index, acknowledged)
            message.content = contents[shared]
        return messages

    def decoded(self, reply: Message, weighted_by_key: str) -> Message | None:
        """Return the reply as the wrapped strategy is to see it: a model, an error, or None for nothing."""
        node_id = reply.metadata.src_node_id
        try:
            instruction = self._answered(reply)
        except PayloadError as error:
            self._lose(node_id, error)
            return None
        if reply.has_error():
            self._errors[f"error {reply.error.code}"] += 1
            self._reasons.append(str(reply.error.reason))
            return reply
        try:
            checked_metrics(reply.content, weighted_by_key)
            reply.content = self._model(reply.content, instruction)
        except PayloadError as error:
            self._lose(node_id, error)
            self.replaced += 1
            return Message(Error(_ERROR, str(error)), reply_to=instruction)
        return reply

    def absorb(self, model: Message) -> None:
        """Note that the strategy takes a reply."""
        self.absorbed.add(model.metadata.src_node_id)
        if self.contents is not None:
            self.contents[model.metadata.src_node_id] = model.content

    def select(self, contents: list[RecordDict]) -> None:
        """Note that of all replies the strategy made its model of those with these contents."""
        selected, known = set(map(id, contents)), self.contents or {}
        self.absorbed &= {node for node, content in known.items() if id(content) in selected}

    def explain(self, server_round: int) -> None:
        """Raise TooFewRepliesError if what came says that the ClientApp does not compress as it should."""
        lost = self._errors + self.undecoded
        unsound = next((reason for reason in self._reasons if UNSOUND in reason), None)
        if unsound is not None:
            because = f"The nodes refuse: {unsound}"
        elif self.undecoded[_NOT_COMPRESSED]:
            because = (
                "The ClientApp must compress: ClientApp(mods=[compress_reply]), with 'from hedgerow.clients "
                "import compress_reply'"
            )
        elif self._errors[f"error {_MOD_FAILED}"]:
            because = (
                f"A mod was not given what it needs ({self._reasons[0]}). mods=[compress_reply, ...]: "
                "compress_reply comes before all mods that look at arrays"
            )
        else:
            # What Flower's mods answer to a reply that they do not take is itself no reply.
            why = self._reasons[0] if self._reasons else "no reply"
            log(
                WARNING, "Round %d: no update (%s). In mods=[...] compress_reply is first.", server_round, why
            )
            return
        counts = ", ".join(f"{count} x {reason}" for reason, count in sorted(lost.items()))
        raise TooFewRepliesError(
            f"Round {server_round}: no update in {len(self._asked)} replies ({counts}). {because}."
        )

    def acknowledge(self, round_index: int) -> None:
        """Note that the updates that were absorbed are in the model."""
        self.feedback.acknowledge(map(self._key, sorted(self.absorbed)), round_index)

    @property
    def report(self) -> ExchangeReport:
        """What was sent, decoded and lost."""
        silent = Counter({"no reply": len(self._waiting)} if self._waiting else {})
        return ExchangeReport(len(self._asked), len(self.absorbed), self._errors + self.undecoded + silent)

    def state_dict(self) -> dict[str, Any]:
        """Return what outlives a round."""
        traffic = [self.bits, self.payload_bytes, self.dense_bits, self.dense_payload_bytes]
        return {**self.feedback.state_dict(), "traffic": traffic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.feedback.load_state_dict(state)
        self.bits, self.payload_bytes, self.dense_bits, self.dense_payload_bytes = map(int, state["traffic"])

    def _key(self, node_id: int) -> int:
        return self._partition_ids.get(node_id, node_id)

    def _asking(self, content: RecordDict, round_index: int, acknowledged: int) -> RecordDict:
        if len(content.array_records) != 1 or len(content.config_records) > 1:
            raise ValueError(
                "the strategy's messages must hold one ArrayRecord and at most one ConfigRecord, got "
                f"{len(content.array_records)} and {len(content.config_records)}"
            )
        key, config = next(iter(content.config_records.items()), ("config", ConfigRecord()))
        asked = {**self.feedback.asked(round_index), "acknowledged": acknowledged}
        return RecordDict({**content, key: ConfigRecord({**config, **asked})})

    def _answered(self, reply: Message) -> Message:
        """Return what the reply answers, which is then waited for no longer."""
        node_id = reply.metadata.src_node_id
        if node_id not in self._asked:
            raise PayloadError("unknown node", f"node {node_id}")
        instruction = self._asked[node_id]
        if reply.metadata.group_id != instruction.metadata.group_id:
            raise PayloadError("stale", f"of round {reply.metadata.group_id!r}")
        if node_id not in self._waiting:
            raise PayloadError("duplicate", f"node {node_id}")
        self._waiting.remove(node_id)
        return instruction

    def _model(self, content: RecordDict, instruction: Message) -> RecordDict:
        """Return the reply's content with the model in place of its update, and count both."""
        ((name, arrays),) = instruction.content.array_records.items()
        if id(arrays) not in self._models:
            self._models[id(arrays)] = _Sent.of(arrays)
        sent = self._models[id(arrays)]
        if not isinstance(self._coding, CompressedChanges):
            model = _only_arrays(content)
            sent.layout.flatten(promoted(sent.layout, model), sent.vector.dtype)
        else:
            model = _rebuilt(self._coding, _only_arrays(content, _UPDATE), sent)
        dense_bits = 32 * compressed_part(sent.layout).size
        self.bits += nominal_bits(model, dense_bits)
        self.payload_bytes += payload_bytes(model)
        self.dense_bits += dense_bits
        self.dense_payload_bytes += payload_bytes(to_record(record_payload(model)))
        return RecordDict({name: model, **content.metric_records, **content.config_records})

    def _lose(self, node_id: int, error: PayloadError) -> None:
        self.undecoded[error.reason] += 1
        log(INFO, "\t> Update of node %d not used: %s", node_id, error)


def _rebuilt(coding: CompressedChanges, record: ArrayRecord, sent: _Sent) -> ArrayRecord:
    """Return the model x^k + Q(m), which is counted as the update that came."""
    part = compressed_part(sent.layout)
    update, dense, bits = coding.unpacked(record, sent.layout)
    with np.errstate(over="ignore"):  # What overflows is infinite, and found below.
        values = record_payload(part.unflatten(sent.vector + update)) | dense
    if not all(np.isfinite(values[key]).all() for key in part.keys):
        raise PayloadError("non-finite", "the model with the update added overflows")
    return decoded_record({key: values[key] for key in sent.layout.keys}, payload_bytes(record), bits)


def _only_arrays(content: RecordDict, key: str | None = None) -> ArrayRecord:
    if len(content.array_records) != 1:
        raise PayloadError("bad arrays", f"{len(content.array_records)} ArrayRecords, expected one")
    ((name, record),) = content.array_records.items()
    if key not in (None, name):
        raise PayloadError(_NOT_COMPRESSED, f"the ArrayRecord is {name!r}, expected {key!r}")
    return record


def _partition_ids(strategy: Strategy) -> dict[int, int]:
    """Return partition ids by node id, where the strategy has asked its nodes."""
    federation = getattr(strategy, "federation", None)
    nodes = federation.nodes if isinstance(federation, Federation) else ()
    return {node.node_id: node.partition_id for node in nodes}
