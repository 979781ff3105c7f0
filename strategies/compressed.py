"""Any Strategy with compressed uplinks and error feedback.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Algorithm 2, step 5: the server adds the update to its copy of x^k, x^k + Q(m).
Differs: each reply is decoded to a model before the wrapped strategy sees it, so that any aggregation works
unchanged.
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
from hedgerow.strategies.options import check_options
from hedgerow.strategies.parts.compression import CompressedChanges, ErrorFeedback
from hedgerow.strategies.round_end import TooFewRepliesError
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
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import (
    Layout,
    PayloadError,
    decoded_record,
    nominal_bits,
    payload_bytes,
    to_record,
    view,
)

_UPDATE = "update"
# Flower's codes for an unknown error, and for a mod that lacks an input.
_ERROR, _MOD_FAILED = 0, 6
_NOT_COMPRESSED = "not compressed"
# They compare updates by coordinates or by distances. Krum is a MultiKrum.
_ROBUST = (Bulyan, FedMedian, FedTrimmedAvg, MultiKrum)
# Their models are trees, sent as bytes.
_TREES = (FedXgbBagging, FedXgbCyclic)
_CLIENT_PRIVACY = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


def _named(compressor: str | Compressor) -> Compressor:
    """Return the compressor of a text, or of an object's text, since nodes get no more; else ValueError."""
    try:
        return parse_compressor(str(compressor))
    except ValueError as error:
        if isinstance(compressor, str):
            raise
        raise ValueError(
            "compressor must be a text such as 'topk(0.01)', from which nodes make it, or an object with "
            f"such a text, got {quoted(compressor)}"
        ) from error


class Compressed(Strategy):
    """A Strategy whose nodes send compressed updates.

    **The ClientApp must compress: hedgerow's do; any other with one ArrayRecord and one MetricRecord in its
    replies to ``train`` needs ``ClientApp(mods=[compress_reply])``.** Each message's config requests the
    ``compressor``, ``error-feedback``, ``round-index`` (the round, from 0) and ``acknowledged`` (the
    ``round-index`` of the node's last absorbed update, or -1).

    Parameters
    ----------
    strategy : Strategy
        Any strategy of Flower or hedgerow, or any other with a ``start`` that does not call
        ``super().start``. Attributes that this class does not define are read from it and written to it.
    compressor : str or Compressor (default: "topk(0.01)")
        As for ``parse_compressor``. With ``identity`` replies are dense, and only checked and counted.
        Medians, trimmed means, Krum and Bulyan require ``sign``, or ``randk(0.1)`` (the same entries at all
        nodes). In ``randk(0.1)`` an entry is sent every tenth round on average, with the changes of ten
        rounds, so local steps must be smaller than without compression: a tenth is safe.
    error_feedback : bool (default: True)
        Nodes keep the compression error and add it to their next message.

    Raises
    ------
    ValueError
        If the compressor is not valid; if the strategy's models are trees; if a sparse compressor (each node
        chooses its entries) meets a robust strategy, which would take the missing entries for zeros that most
        nodes want; if nodes clip their updates for the strategy and ``error_feedback`` adds to them
        afterwards; in the first round, if a differential privacy wrapper is around this one, not inside it.
    TooFewRepliesError
        After the first round, if no reply is an update: the mod is missing, or is not the first one.

    Notes
    -----
    - Running statistics and integers of a state dict are sent uncompressed, next to the update.
    - A reply that is not an update of the sent model, or has non-finite metrics, is passed on as an error,
      which every Strategy counts as a lost reply, and is counted by reason in ``report``.
    - An update counts as absorbed if the round returned a model and the wrapped strategy used the update:
      according to its ``report``, or for Flower's strategies if its metrics were aggregated, which Krum and
      Bulyan do for the replies that they select. A node adds an update that was not absorbed to its next one.
    """

    strategy: Strategy
    uplink: "Uplink"

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an option that the class does not take."""
        check_options(cls, options, len(arguments))
        return super().__new__(cls)

    def __init__(
        self, strategy: Strategy, compressor: str | Compressor = "topk(0.01)", error_feedback: bool = True
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ValueError(f"strategy must be a Strategy of Flower, got {quoted(strategy)}")
        self.strategy = strategy
        self.uplink = Uplink(ErrorFeedback(_named(compressor), error_feedback))
        self._check_composition()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped strategy."""
        if name in Compressed.__annotations__ or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the wrapped strategy's attributes on it: its ``start`` runs with this object as its self."""
        if name in Compressed.__annotations__:
            super().__setattr__(name, value)
        else:
            setattr(self.strategy, name, value)

    @property
    def uplink_bits(self) -> int:
        """Bits, as the paper counts them, of all decoded updates since the start."""
        return self.uplink.bits

    @property
    def uplink_payload_bytes(self) -> int:
        """Serialized bytes of all decoded updates since the start."""
        return self.uplink.payload_bytes

    @property
    def dense_uplink_bits(self) -> int:
        """``uplink_bits`` if nodes had sent whole models."""
        return self.uplink.dense_bits

    @property
    def dense_uplink_payload_bytes(self) -> int:
        """``uplink_payload_bytes`` if nodes had sent whole models."""
        return self.uplink.dense_payload_bytes

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the last training exchange, with the undecoded updates by reason."""
        own, theirs = self.uplink.report, self._their_report()
        if theirs is None:
            return own
        errors = Counter({f"error {_ERROR}": self.uplink.replaced})
        return ExchangeReport(theirs.sent, theirs.accepted, theirs.rejected - errors + self.uplink.undecoded)

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
        """Run the wrapped strategy's ``start`` with this object as its self; ``more`` are its own options."""
        run: Any = type(self.strategy).start
        # By keyword, as the recording of runs expects.
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
        """Return the wrapped strategy's messages, with a request for compressed replies."""
        if server_round == 1:
            if self.uplink.feedback.acknowledged:
                self.uplink.feedback.forget()
                self.uplink = Uplink(self.uplink.feedback)
            for caller in filter(is_flowers, outer_strategies(self)):
                name = type(caller).__name__
                raise ValueError(
                    f"strategy of {name} must not be Compressed: its updates are still coded when {name} "
                    f"sees them; write Compressed({name}(...)), which decodes them first"
                )
        # With the request in its config, the strategy books messages at their final size.
        config = ConfigRecord({**config, **self.uplink.feedback.asked(server_round - 1), "acknowledged": -1})
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        return self.uplink.ask(server_round - 1, messages, _partition_ids(self.strategy))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies as they arrive; the wrapped strategy aggregates them."""
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
        """Return the state; AttributeError if the wrapped strategy has no ``state_dict``, like Flower's."""
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
        """Record which replies a strategy of Flower's selects, by intercepting ``train_metrics_aggr_fn``."""
        owner: Any = next((s for s in chain(self.strategy) if "train_metrics_aggr_fn" in vars(s)), None)
        if owner is None:
            yield
            return
        aggregate = owner.train_metrics_aggr_fn

        def recording(contents: list[RecordDict], *arguments: Any) -> Any:
            self.uplink.select(contents)
            return aggregate(contents, *arguments)

        owner.train_metrics_aggr_fn = recording
        self.uplink.contents = {}
        try:
            yield
        finally:
            owner.train_metrics_aggr_fn = aggregate
            self.uplink.contents = None

    def _decoded(self, replies: Iterable[Message]) -> Generator[Message, None, None]:
        """Yield decoded replies to the wrapped strategy; record which updates it accepts."""
        # An attribute of Flower's strategies, a setting of hedgerow's.
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
            finally:  # Also if the strategy stops reading replies.
                after = self._their_report()
                if model.has_content() and (after is None or after.accepted > accepted):
                    self.uplink.absorb(model)

    def _their_report(self) -> ExchangeReport | None:
        report = getattr(self.strategy, "report", None)
        return report if isinstance(report, ExchangeReport) else None


@dataclass(frozen=True)
class _Sent:
    """The sent model x^k: its layout, and the vector (d,) of its compressed keys."""

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
    """The compressed uplink: requests to nodes, decoding of their replies, and acknowledgements."""

    # Keyed by partition id if the wrapped strategy knows them: node ids do not outlive a run.
    feedback: ErrorFeedback
    bits: int = 0
    payload_bytes: int = 0
    dense_bits: int = 0
    dense_payload_bytes: int = 0
    # Of the current exchange.
    absorbed: set[int] = field(default_factory=set)
    undecoded: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    # By node, if the strategy selects among the replies, all of which it holds itself; else None.
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
        """Add the request to each message's config; equal contents stay one object."""
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
        """Return a reply as the wrapped strategy sees it: a model, an error, or None to drop it."""
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
        """Record that the strategy accepts a reply."""
        self.absorbed.add(model.metadata.src_node_id)
        if self.contents is not None:
            self.contents[model.metadata.src_node_id] = model.content

    def select(self, contents: list[RecordDict]) -> None:
        """Record that the strategy has selected the replies with these contents."""
        selected, known = set(map(id, contents)), self.contents or {}
        self.absorbed &= {node for node, content in known.items() if id(content) in selected}

    def explain(self, server_round: int) -> None:
        """Raise TooFewRepliesError if the replies show that the ClientApp does not compress."""
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
            # Flower's mods reply with an error to a reply that they cannot handle.
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
        """Acknowledge the absorbed updates."""
        self.feedback.acknowledge(map(self._key, sorted(self.absorbed)), round_index)

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the current exchange."""
        silent = Counter({"no reply": len(self._waiting)} if self._waiting else {})
        return ExchangeReport(len(self._asked), len(self.absorbed), self._errors + self.undecoded + silent)

    def state_dict(self) -> dict[str, Any]:
        """Return acknowledgements and traffic."""
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
        """Return the message that a reply answers, and stop waiting for it."""
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
        """Return a reply's content with the model in place of its update, and count both."""
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
    """Return the model x^k + Q(m), with bits and bytes of the update."""
    part = compressed_part(sent.layout)
    update, dense, bits = coding.unpacked(record, sent.layout)
    with np.errstate(over="ignore"):  # An overflow is infinite, and refused below.
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
    """Return partition ids by node id, if the strategy has queried its nodes."""
    federation = getattr(strategy, "federation", None)
    nodes = federation.members.nodes if isinstance(federation, Federation) else ()
    return {node.node_id: node.partition_id for node in nodes}
