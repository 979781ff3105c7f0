"""What HSGD's modelled system is: the links of a method, their rates, and what a round costs on them.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the set-up of the experiments.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.aggregators import Theta
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.costs import PAPER_RATES, Method, Sizes, round_parts, round_seconds
from hedgerow.strategies.hsgd.messages import Schema
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.clock import Rates
from hedgerow.wire.ledger import Ledger

__all__ = ["COMPRESSED", "MERGED", "System"]

COMPRESSED = (Method.C_HSGD, Method.C_TDCD)
MERGED = (Method.TDCD, Method.C_TDCD)


@dataclass(frozen=True)
class System:
    """A method and the system that it is modelled on; parameters as in ``HSGD``.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the parameters do not go together.
    """

    method: Method
    aggregate: bool = True
    original_groups: int = 1
    compute_seconds: float = 0.0
    rates: Rates = PAPER_RATES
    raw_bytes: float = 0.0
    raw_seconds: float = 0.0

    def __post_init__(self) -> None:
        int_at_least(1, original_groups=self.original_groups)
        for key in ("compute_seconds", "raw_bytes", "raw_seconds"):
            in_range(key, getattr(self, key), 0.0, 1e300)
        method = self.method
        if method is Method.JFL and not self.aggregate:
            raise ValueError("aggregate is False; valid is True in jfl, whose pairs last one round")
        if self.original_groups != 1 and not self.merged:
            raise ValueError(
                f"original_groups is {self.original_groups!r}; valid is 1 unless tdcd merges groups"
            )
        for key in ("raw_bytes", "raw_seconds"):
            if (value := getattr(self, key)) and method not in MERGED:
                raise ValueError(f"{key} is {value!r}; valid is 0 in {method}: no raw data moves")

    def check(self, adaptive: Adaptive | None) -> None:
        """Raise ValueError if constants are to be estimated of a model that there is not."""
        if adaptive is not None and not self.aggregate:
            raise ValueError(
                "adaptive is set; valid is None with aggregate=False: the theory is of one model"
            )

    @property
    def merged(self) -> bool:
        """Whether all people are at one hospital."""
        return self.method in MERGED and self.aggregate

    @property
    def pairs(self) -> bool:
        """Whether every drawn pair has a model of its own in a round."""
        return self.method is Method.JFL

    def schema(
        self,
        theta: Theta,
        encodings: tuple[int, int],
        plain: bool = False,
        *,
        sealed: bool = False,
        protected: bool = False,
    ) -> Schema:
        """Return how large what is sent is; ``plain`` for estimates: nothing compressed, and no pairs."""
        compressed, (head, hospital, device) = self.method in COMPRESSED and not plain, map(len, theta)
        pairs = self.pairs and not plain
        dtype = theta.head.dtype
        return Schema(head, hospital, device, *encodings, dtype, compressed, pairs, sealed, protected)

    def books(self, ledger: Ledger, schema: Schema) -> Books:
        """Return the books of what is sent."""
        return Books(ledger, schema, self.method, self.aggregate, self.original_groups)

    def seconds(self, schema: Schema, batches: Iterable[int], P: int, Q: int) -> float:
        """Return how long a global interval of the slowest of groups with such batches takes; 0 of none."""
        apart = Method.C_TDCD if self.method in COMPRESSED else Method.TDCD
        method = self.method if self.aggregate else apart

        def of(a: int) -> float:
            sizes = Sizes(schema.head, schema.hospital, schema.device, schema.zeta1, schema.zeta2, a)
            parts = round_parts(sizes, rates=self.rates, method=method)
            return round_seconds(parts, P=P, Q=Q, compute_seconds=self.compute_seconds)

        return max((of(a) for a in set(batches)), default=0.0)
