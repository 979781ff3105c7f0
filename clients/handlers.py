"""Handlers of many calls at once; a failing call does not fail the others."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flwr.app import RecordDict

from hedgerow.wire.calls import BatchHandler, Call

Answer = RecordDict | Exception
Job = TypeVar("Job")
Found = TypeVar("Found")
Result = TypeVar("Result")


def outcome(work: Callable[..., Found], *arguments: object) -> Found | Exception:
    """Return the result of the work, or the exception that it raised."""
    try:
        return work(*arguments)
    except Exception as error:
        return error


def each(work: Callable[[Call], RecordDict]) -> BatchHandler:
    """Return a handler that answers call by call."""
    return lambda calls: [outcome(work, call) for call in calls]


def together(
    read: Callable[[Call], Job | RecordDict],
    work: Callable[[Sequence[Call], Mapping[int, Job]], Mapping[int, Result | Exception]],
) -> Callable[[Sequence[Call]], list[Result | Answer]]:
    """Return a handler that works on all calls at once.

    Parameters
    ----------
    read : Callable[[Call], Job or RecordDict]
        Returns a validated job, or the answer if there is nothing to compute.
    work : Callable[[Sequence[Call], Mapping[int, Job]], Mapping[int, Result or Exception]]
        Computes the results of one job or more; jobs and results are keyed by the positions of their calls.
    """

    def handle(calls: Sequence[Call]) -> list[Result | Answer]:
        jobs: dict[int, Job] = {}
        answers: dict[int, Result | Answer] = {}
        for at, call in enumerate(calls):
            try:
                job = read(call)
            except Exception as error:  # it must not fail the other nodes
                answers[at] = error
                continue
            if isinstance(job, RecordDict):
                answers[at] = job
            else:
                jobs[at] = job
        if jobs:
            answers |= work(calls, jobs)
        return [answers[at] for at in range(len(calls))]

    return handle
