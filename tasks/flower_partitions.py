"""Partitions by a partitioner of flwr-datasets, named with its arguments.

For example ``"flwr_datasets:DirichletPartitioner(alpha=0.5, min_partition_size=2)"``. It also gets the number
of partitions, the label column and the run's seed. Arguments are literals: nothing is evaluated.
"""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .extras import needed

PREFIX = "flwr_datasets:"
_LABEL = "label"


def named_partitioner(scheme: str) -> tuple[str, Mapping[str, Any]]:
    """Return the class and the arguments of a scheme.

    Raises
    ------
    ValueError
        If it is not ``flwr_datasets:NAME`` or ``flwr_datasets:NAME(key=value, ...)`` with literals.
    """
    try:
        expression = ast.parse(scheme.removeprefix(PREFIX).strip(), mode="eval").body
        call = expression if isinstance(expression, ast.Call) else ast.Call(expression, [], [])
        if not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        return call.func.id, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"partition must be '{PREFIX}NAME(key=value, ...)' with numbers, texts and lists, as "
            f"'{PREFIX}DirichletPartitioner(alpha=0.5)', got {scheme!r}"
        ) from None


def parts_of(scheme: str, labels: NDArray[Any], num_partitions: int, seed: int) -> list[NDArray[np.int64]]:
    """Return each partition's samples (n,), ascending, from a named partitioner.

    Parameters
    ----------
    scheme : str
        As for ``named_partitioner``.
    labels : ndarray of int, (N,)
        The training labels.
    num_partitions : int
        Number of partitions, 1..N.
    seed : int
        The run's seed, for a partitioner that takes one.

    Raises
    ------
    ValueError
        If flwr-datasets has no such partitioner, it refuses its arguments or these labels, or a partition has
        no sample.
    """
    name, asked = named_partitioner(scheme)
    partitioners = needed("flwr_datasets.partitioner", "partitioners", f"partition = {scheme!r}")
    kind = getattr(partitioners, name, None) if name in partitioners.__all__ else None
    if kind is None:
        names = ", ".join(one for one in partitioners.__all__ if one != "Partitioner")
        raise ValueError(f"partition must name one of {names}, got {scheme!r}")
    ours: dict[str, Any] = {"num_partitions": num_partitions, "partition_by": _LABEL, "seed": seed}
    takes = inspect.signature(kind).parameters
    dataset = needed("datasets", "partitioners", f"partition = {scheme!r}").Dataset
    try:
        dealt = kind(**{**{key: value for key, value in ours.items() if key in takes}, **asked})
        dealt.dataset = dataset.from_dict({_LABEL: labels.tolist(), "at": range(len(labels))})
        found = [np.sort(np.asarray(dealt.load_partition(i)["at"], np.int64)) for i in range(num_partitions)]
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"partition = {scheme!r}, {num_partitions} partitions: {error}") from error
    if empty := sum(not part.size for part in found):
        raise ValueError(
            f"partition = {scheme!r} must give each of {num_partitions} partitions a sample, got {empty} "
            "without any"
        )
    return found
