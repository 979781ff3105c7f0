"""The simulated clock, and the seconds that bits and floating-point operations take.

A method's latency formula adds these costs; the clock keeps the sum. Simulated seconds are computed, never
measured: a record has them beside the real wall time, not in place of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hedgerow.wire.checks import not_negative, positive


@dataclass(frozen=True, slots=True)
class Rates:
    """Data rates of a modeled system.

    Parameters
    ----------
    bits_per_second : Mapping[str, float]
        Rate by the name of the link, all > 0, for example ``{"client->edge": 5e6}``.

    Raises
    ------
    ValueError
        If a rate is not a finite number > 0.
    """

    bits_per_second: Mapping[str, float]

    def __post_init__(self) -> None:
        # A copy, so that the caller cannot change a rate after the check.
        object.__setattr__(self, "bits_per_second", dict(self.bits_per_second))
        for link, rate in self.bits_per_second.items():
            positive(**{f"bits_per_second[{link!r}]": rate})

    def seconds(self, bits: float, link: str) -> float:
        """Return the seconds that ``bits`` (>= 0) take over a link.

        Raises
        ------
        ValueError
            If the link has no rate, or ``bits`` is negative or not finite.
        """
        if link not in self.bits_per_second:
            known = ", ".join(map(repr, sorted(self.bits_per_second)))
            valid = f"one of {known}" if known else "one with a rate"
            raise ValueError(f"link must be {valid}, got {link!r}")
        not_negative(bits=bits)
        return bits / self.bits_per_second[link]


@dataclass(frozen=True, slots=True)
class Compute:
    """The cost of local work at one kind of node.

    Parameters
    ----------
    flops_per_iteration : float
        Floating-point operations of one local iteration, > 0.
    flops_per_second : float
        Speed of the node, > 0.

    Raises
    ------
    ValueError
        If either is not a finite number > 0.
    """

    flops_per_iteration: float
    flops_per_second: float

    def __post_init__(self) -> None:
        positive(flops_per_iteration=self.flops_per_iteration, flops_per_second=self.flops_per_second)

    def seconds(self, iterations: float = 1) -> float:
        """Return the seconds that ``iterations`` (>= 0) local iterations take."""
        not_negative(iterations=iterations)
        return iterations * (self.flops_per_iteration / self.flops_per_second)


class Clock:
    """Simulated seconds since the start of a run."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Simulated seconds so far."""
        return self._seconds

    def advance(self, seconds: float) -> float:
        """Let ``seconds`` (finite, >= 0) pass and return the new time.

        Raises
        ------
        ValueError
            If ``seconds`` is negative or not finite: a simulated clock never goes back.
        """
        not_negative(seconds=seconds)
        self._seconds += seconds
        return self._seconds

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"seconds": self._seconds}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint.

        Raises
        ------
        ValueError
            If the state has no ``seconds``, or they are negative or not finite.
        """
        if "seconds" not in state:
            raise ValueError(f"state must be a clock's, with 'seconds', got the keys {sorted(state)}")
        not_negative(seconds=state["seconds"])
        self._seconds = float(state["seconds"])
