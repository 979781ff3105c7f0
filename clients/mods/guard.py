"""The guard before every handler of a node enforces the owner's policy.

``policy.py`` has the policy and ``releases.py`` the ledger of releases; docs/privacy.md explains the guard's
purpose and limits. Under a strict policy the guard is an allow-list: a handler declares what its answers
reveal about the node's records (``Reveals``), and one that declares nothing is not run. Handlers call the
guard before they draw noise, replace a state or answer a monitor. Without a policy, as in simulations, the
checks do nothing.

The only errors that leave a guarded node are ``Refusal``s with fixed phrases. The node's state is then
restored, and its own log has the details.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from hashlib import sha256
from logging import ERROR, WARNING
from math import inf
from pathlib import Path
from types import FrameType
from typing import TypeVar

from flwr.app import RecordDict
from flwr.common import log

from hedgerow.clients.handlers import Answer
from hedgerow.clients.policy import PRIVACY_MODES, Policy, policies_of
from hedgerow.clients.process_memory import is_out_of_memory, limited_memory
from hedgerow.clients.releases import Releases, ReleasesError, Spent, TooOften, epsilon_of
from hedgerow.tasks.permissions import Permissions, permitted
from hedgerow.tasks.sources import DATA_DIR_VARIABLE
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.masked_sums import MASKED, MASKED_SUM
from hedgerow.wire.message_types import MONITOR, NO_MESSAGE, NO_MONITOR, RESTORE, STATE
from hedgerow.wire.printable import shown, traced
from hedgerow.wire.process import is_simulated, simulation, simulation_folder
from hedgerow.wire.records import payload_bytes

Noted = TypeVar("Noted")

# Most epsilon, at the policy's delta, of a release that ``max-unprotected`` takes for protected.
_MOST_EPSILON = 10.0

FAILED = "this node could not answer; its own log says why"
NO_POLICY = "this node's policy is not valid: it answers nothing"
NO_STATE = "this node's state stays here"
TOO_LARGE = "the message is larger than this node takes"
TOO_LONG = "the message took longer than this node gives one"
TOO_MUCH = "the message took more memory than this node gives one"
NO_IMPORT = "the import path is none that this node allows"
NO_FILE = "the file or folder is none that this node lets a run name"
TOO_OFTEN = "this run asked for that as often as it may"
CHANGED = "this node's records changed, and it reported such sums of them as often as it may"
WEAK = "the privacy is weaker than this node's owner allows"
UNPROTECTED = "this node's policy does not cover what such a message would reveal"
SPENT = "this node's privacy budget is spent"
NO_LEDGER = "this node cannot write down what it releases, so it releases nothing"


class Refusal(PermissionError):  # noqa: N818
    """A refused message; the error reveals nothing about the node.

    Parameters
    ----------
    phrase : str
        One of the fixed phrases above.
    key : str or None (default: None)
        The configuration key concerned, as the suite's own code spells it.
    """

    def __init__(self, phrase: str, key: str | None = None) -> None:
        super().__init__(f"{key}: {phrase}" if key else phrase)


class KeyMistake(ValueError):  # noqa: N818
    """An invalid key of a message's config, one that the suite's own code reads.

    The sender may learn this key. Keys are never searched for in an error's text, where a server could probe
    for words of a file.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


class Reveals(Flag):
    """What a handler's answers reveal about a node's records."""

    # Unprotected models, gradients, losses or statistics; the default without a declaration.
    RECORDS = 0
    # At most the presence, number and shape of the records.
    NOTHING = auto()
    # A secure sum, if the message asks for one.
    SUMMED = auto()
    # Noised values; the handler calls ``check_privacy``.
    NOISED = auto()


@dataclass(frozen=True)
class Declared:
    """A handler with a declaration of what its answers reveal."""

    handler: BatchHandler
    reveals: Callable[[RecordDict], Reveals]

    def __call__(self, calls: Sequence[Call]) -> Sequence[Answer]:
        """Answer the calls."""
        return self.handler(calls)


def reveals(what: Reveals | Callable[[RecordDict], Reveals], handler: BatchHandler) -> BatchHandler:
    """Return the handler with a declaration, fixed or a function of the message's content."""
    return Declared(handler, what if callable(what) else lambda content: what)


def reveals_of(handler: BatchHandler) -> Callable[[RecordDict], Reveals]:
    """Return a handler's declaration, ``Reveals.RECORDS`` if it has none."""
    return handler.reveals if isinstance(handler, Declared) else lambda content: Reveals.RECORDS


class _OutOfTime(BaseException):
    """Raised in a handler at its time limit; a BaseException, so that handlers do not catch it."""


@dataclass
class _Watch:
    """The message that a guarded node is processing."""

    policy: Policy
    call: Call
    # The protection that the handler has applied, and whether some of the answer has none.
    done: Reveals = Reveals.RECORDS
    bare: bool = False
    # Whether some of the answer's noise is too little to protect.
    is_weak: bool = False
    # Whether a unit of ``max-unprotected`` is reserved; None if none is left, or the policy sets no limit.
    reserved: bool | None = None

    @property
    def is_spent(self) -> bool:
        """Whether no unprotected answer may be given any more."""
        return self.policy.max_unprotected is not None and not self.reserved

    def ledger(self) -> Releases:
        """Return the node's ledger: a simulated one's is its simulation's, unless its policy names one."""
        if not (name := simulation()):
            return Releases(self.policy.ledger_file)
        own = simulation_folder(name) / f"{self.call.partition_id}.jsonl"
        return Releases(self.policy.ledger or own, f"{name}/{self.call.partition_id}")

    def noted(self, note: Callable[..., Noted], *about: object, over: Refusal | None = None) -> Noted:
        """Write a ledger entry for this node's run; Refusal if that is not allowed or fails.

        ``over`` is the refusal of what was done as often as it may, by default ``TOO_OFTEN``.
        """
        context, name = self.call.context, simulation()
        run = f"{context.run_id}@{name}" if name else str(context.run_id)
        try:
            return note(self.ledger(), run, context.node_id, *about)
        except ReleasesError as error:
            raise Refusal(NO_LEDGER) from error
        except Spent as error:
            raise Refusal(SPENT) from error
        except TooOften as error:
            raise (over or Refusal(TOO_OFTEN)) from error


# Per process, not per thread, so that a handler's own threads are guarded too.
_watch: _Watch | None = None


def guarded(message_type: str, handler: BatchHandler) -> BatchHandler:
    """Return the handler behind the guard, which answers nodes with a policy one by one."""
    declared = reveals_of(handler)

    def handle(calls: Sequence[Call]) -> Sequence[Answer]:
        if _watch is not None:  # an app within another, which is already guarded
            return handler(calls)
        policies = policies_of(call.context for call in calls)
        free = [at for at, policy in enumerate(policies) if policy is None]
        if len(free) == len(calls):
            return handler(calls)
        answers: dict[int, Answer] = {}
        if free:
            answers.update(zip(free, handler([calls[at] for at in free]), strict=True))
        for at, (call, policy) in enumerate(zip(calls, policies, strict=True)):
            if policy is not None:
                answers[at] = _answer(message_type, handler, declared, call, policy)
        return [answers[at] for at in range(len(calls))]

    return Declared(handle, declared)


def _answer(
    message_type: str,
    handler: BatchHandler,
    declared: Callable[[RecordDict], Reveals],
    call: Call,
    policy: Policy | Exception,
) -> Answer:
    """Return a node's answer, or a ``Refusal`` in place of any error."""
    global _watch  # noqa: PLW0603
    if isinstance(policy, Exception):
        log(ERROR, "This node answers nothing: %s", policy)
        return Refusal(NO_POLICY)
    watch, before = _Watch(policy, call), call.context.state.copy()
    answer: Answer
    what, late = Reveals.RECORDS, False
    _watch = watch
    try:
        what = declared(call.content)
        _check_message(message_type, watch, what)
        with permitted(_permissions(watch)), _limited(policy.max_seconds), _bounded(policy):
            (answer,) = handler([call])
        if isinstance(answer, RecordDict):
            _check_answer(watch, what, answer)
    except Exception as error:
        answer = error
    except _OutOfTime:
        answer, late = Refusal(TOO_LONG), True
    finally:
        _watch = None
    if not isinstance(answer, Exception):
        return answer
    call.context.state = before
    refusal = None
    if what is not Reveals.NOTHING and watch.is_spent and (late or not isinstance(answer, Refusal)):
        # How the handler failed may depend on the records, and no unit is left to tell.
        refusal = Refusal(TOO_OFTEN)
    elif policy.max_memory is not None and is_out_of_memory(answer):
        refusal = Refusal(TOO_MUCH)
    if refusal is not None:
        refusal.__cause__ = answer
        answer = refusal
    if isinstance(answer, Refusal):
        cause = shown(answer.__cause__ or "policy", 300)
        log(WARNING, "Refused %s: %s (%s)", shown(message_type), answer, cause)
        return answer
    log(ERROR, "%s was not answered\n%s", shown(message_type), traced(answer))
    return Refusal(FAILED, answer.key if isinstance(answer, KeyMistake) else None)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ``_OutOfTime`` in the block after so many seconds.

    It interrupts only Python code in the main thread, where ``flwr-clientapp`` runs handlers. In other
    threads, and without POSIX timers, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _bounded(policy: Policy) -> AbstractContextManager[None]:
    """Limit the memory of the block if the process handles only this message."""
    if policy.max_memory is None or not is_simulated():
        return limited_memory(policy.max_memory)
    _warn_of_no_bound()
    return nullcontext()


@cache
def _warn_of_no_bound() -> None:
    log(WARNING, "max-memory has no effect in a simulation: its nodes share a process")


def _check_message(message_type: str, watch: _Watch, what: Reveals) -> None:
    """Raise Refusal for a message that the policy does not allow; called before the handler."""
    policy, call = watch.policy, watch.call
    if policy.messages is not None and message_type not in policy.messages:
        raise Refusal(NO_MESSAGE)
    if message_type == MONITOR and not policy.monitor:
        raise Refusal(NO_MONITOR)
    if message_type in (STATE, RESTORE) and not policy.share_state:
        raise Refusal(NO_STATE)
    if payload_bytes(call.content) > policy.max_bytes:
        raise Refusal(TOO_LARGE)
    if what is Reveals.NOTHING:
        return
    is_summed = _asks_for_sum(call, what)
    if policy.secure_sums == "required" and not is_summed:
        raise Refusal(UNPROTECTED, "secure-sums")
    if policy.privacy != "none" and not (is_summed or Reveals.NOISED in what):
        raise Refusal(UNPROTECTED, "privacy")
    if policy.max_unprotected is None:
        return
    # Reserved before the handler runs, whatever it declares, because a failed answer counts as well.
    try:
        watch.noted(Releases.open, message_type, policy.max_unprotected)
        watch.reserved = True
    except Refusal as refused:
        # Without a unit, only a protected answer may leave.
        if not (is_summed or Reveals.NOISED in what) or not isinstance(refused.__cause__, TooOften):
            raise


def _check_answer(watch: _Watch, what: Reveals, answer: RecordDict) -> None:
    """Raise Refusal for an answer without the required protection, and charge for what was done."""
    policy = watch.policy
    if what is Reveals.NOTHING:
        return
    noised = Reveals.NOISED in watch.done and not watch.bare
    if policy.secure_sums == "required" and not _asks_for_sum(watch.call, what):
        raise Refusal(UNPROTECTED, "secure-sums")
    if policy.privacy != "none" and not (noised or Reveals.NOTHING in watch.done):
        raise Refusal(UNPROTECTED, "privacy")
    if policy.max_unprotected is None:
        return
    summed = Reveals.SUMMED in what and _is_summed(answer)
    if (noised and not watch.is_weak) or summed or Reveals.NOTHING in watch.done or not any(answer.values()):
        if watch.reserved:
            watch.noted(Releases.give_back)
    elif not watch.reserved:
        raise Refusal(TOO_OFTEN)


def _asks_for_sum(call: Call, what: Reveals) -> bool:
    return Reveals.SUMMED in what and MASKED_SUM in call.content


def _is_summed(answer: RecordDict) -> bool:
    """Return whether an answer's only arrays are a masked update."""
    return set(answer.array_records) == {MASKED}


def _permissions(watch: _Watch) -> Permissions:
    node = watch.call.context.node_config
    listed = (path.strip() for path in str(node.get("allow-imports", "")).split(","))
    imports = {*watch.policy.imports, *filter(None, listed)}
    named = (str(node.get(key) or "") for key in ("data-dir", "data"))
    own = [Path(one).expanduser() for one in (*named, os.environ.get(DATA_DIR_VARIABLE, "")) if one]
    folders = [folder.resolve() for folder in (*watch.policy.folders, *own)]

    def check_import(key: str, path: str) -> None:
        if path not in imports:
            raise Refusal(NO_IMPORT, key) from ValueError(
                f"{key} must be one of {sorted(imports)} here, got {path!r}"
            )

    def check_file(key: str, path: Path) -> None:
        found = path.resolve()  # a symbolic link that leads out of a folder is not in it
        if not any(found.is_relative_to(folder) for folder in folders):
            raise Refusal(NO_FILE, key) from ValueError(f"{key} must be within {folders}, got {found}")

    return Permissions(check_import, check_file)


# Checks that handlers call. Each raises Refusal if the policy forbids the action or the ledger fails.


def is_guarded() -> bool:
    """Return whether the current node has a policy, whose choices a run cannot override."""
    return _watch is not None


def check_hello() -> None:
    """Record that a gossip method begins at this node; a policy limits how often per run."""
    if _watch is not None:
        _watch.noted(Releases.hello, _watch.policy.max_hellos)


def locked_number() -> int:
    """Return the number for a state that is to be locked, 0 without a ledger."""
    return 0 if _watch is None else _watch.noted(Releases.lock)


def check_restore(of: str, number: int) -> None:
    """Record that the node's state is replaced by state ``number`` of run ``of``.

    A policy limits how often per run, and no state may be older than one restored before.
    """
    if _watch is not None:
        _watch.noted(Releases.restore, _watch.policy.max_restores, of, number)


def check_pooled(kind: str, source: str, *parts: bytes) -> None:
    """Record a sum over a node's records that is reported without noise.

    Two sums that differ by one record reveal it, so a policy limits the different sums of each kind over all
    runs; the same sum may be reported again. ``source`` names the records; ``parts`` identify the sum.
    """
    if _watch is None:
        return
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    records = sha256(f"{kind}\n{source}".encode()).hexdigest()[:32]
    sums = digest.hexdigest()[:32], _watch.policy.max_pooled
    _watch.noted(Releases.pooled, records, *sums, over=Refusal(CHANGED, "max-pooled"))


def check_sum(number: int) -> None:
    """Record that a node reveals its shares for a secure sum, which it does once per sum."""
    if _watch is not None:
        _watch.noted(Releases.summed, number)


def check_privacy(mode: str, multiplier: float = inf, clip: float = inf) -> None:
    """Check a run's privacy against the policy; unless the mode is ``none``, the answer counts as noised.

    Mode ``none`` says that something in the answer is not noised; whatever else is, the answer is then
    unprotected. So it is in mode ``paper``, and with an epsilon above 10 at the policy's delta. In mode
    ``sound`` ``multiplier`` is the noise deviation in sensitivities and ``clip`` the clipping norm.
    """
    if _watch is None:
        return
    policy = _watch.policy
    if PRIVACY_MODES.index(mode) < PRIVACY_MODES.index(policy.privacy):
        raise Refusal(WEAK, "privacy")
    if mode == "sound":
        if clip > policy.max_clip:
            raise Refusal(WEAK, "clip")
        if multiplier < policy.min_noise_multiplier:
            raise Refusal(WEAK, "epsilon")
        most = policy.max_epsilon_per_release
        if most < inf and epsilon_of([multiplier], policy.delta) > most:
            raise Refusal(WEAK, "epsilon")
    if mode != "none":
        _watch.done |= Reveals.NOISED
        if policy.max_unprotected is not None:
            # The server chooses the noise: it may be next to none, and mode ``paper`` guarantees nothing.
            is_weak = mode != "sound" or epsilon_of([multiplier], policy.delta) > _MOST_EPSILON
            _watch.is_weak = _watch.is_weak or is_weak
        return
    _watch.bare = True
    if _watch.is_spent:
        raise Refusal(TOO_OFTEN)


def reveals_nothing() -> None:
    """Mark this answer as revealing nothing about the node's records, though others of its type do."""
    if _watch is not None:
        _watch.done |= Reveals.NOTHING


def check_release(root: int, index: int, multiplier: float) -> None:
    """Record a release before its noise is drawn from ``root`` and ``index``; used noise is refused.

    ``multiplier`` > 0 is the noise deviation in sensitivities.
    """
    if _watch is not None:
        policy = _watch.policy
        _watch.noted(Releases.release, root, index, multiplier, policy.delta, policy.max_epsilon)


def releases_made() -> tuple[int, int] | None:
    """Return ``Releases.made`` of the run; None without a ledger."""
    return None if _watch is None else _watch.noted(lambda ledger, run, _: ledger.made(run))


def check_monitor(mode: str) -> None:
    """Raise Refusal if the server may not read a node's model and objective in this privacy mode."""
    if not is_monitored(mode):
        raise Refusal(NO_MONITOR)


def is_monitored(mode: str) -> bool:
    """Return whether the server may read a node's objective."""
    if _watch is None:
        return True
    return _watch.policy.monitor and _watch.policy.privacy == "none" and mode != "sound"


def needs_entropy() -> bool:
    """Return whether noise must come from the operating system, whatever the run asks for."""
    return _watch is not None and _watch.policy.noise_source == "entropy"
