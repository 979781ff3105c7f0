"""FedMUD and its baselines: clients."""

from hedgerow.clients.fedmud.client import fedmud_client
from hedgerow.clients.fedmud.factored_model import FactoredModel, wrap

__all__ = ["FactoredModel", "fedmud_client", "wrap"]
