"""Secure sums of factors and of what is not compressed: what nodes count in them."""

from collections.abc import Sequence
from math import ceil

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.fedmud.replies import UP, Weighting
from hedgerow.strategies.fedmud.sending import DOWN
from hedgerow.strategies.secure_sums import SecureSum, SecureSums

__all__ = ["LayerSums"]


class LayerSums(SecureSums):
    """The sums of one run.

    Parameters
    ----------
    settings : SecureSum
        The settings.
    federation : Federation
        The nodes, and their sizes.
    weighting : {"num-examples", "num-batches", "uniform"}
        What a node counts.
    batch_size : int
        Examples of a mini-batch.
    """

    def __init__(
        self, settings: SecureSum, federation: Federation, weighting: Weighting, batch_size: int
    ) -> None:
        self.weighting, self.batch_size = weighting, batch_size
        by = {"num-examples": None, "num-batches": weighting, "uniform": ""}[weighting]
        super().__init__(settings, federation, down_link=DOWN, up_link=UP, weighted_by=by)

    def weight_of(self, member: int) -> float:
        """Return the most that a member counts: its examples, or the batches that they make."""
        examples = super().weight_of(member)
        return float(ceil(examples / self.batch_size)) if self.weighting == "num-batches" else examples

    def mean_batches(self, survivors: Sequence[int]) -> float:
        """Return the batches of an epoch of the mean survivor."""
        batches = [ceil(self.federation.weight_of(one) / self.batch_size) for one in survivors]
        return sum(batches) / max(1, len(batches))
