"""The nodes of the app: Algorithm 1 or a baseline, on each node's own data."""

from flwr.app import Context

from ceps.problems import evaluate_own, node_problem
from hedgerow.clients import ceps_client, whoami
from hedgerow.clients.handlers import each
from hedgerow.clients.own_share import has_own, own_handlers, own_introduction, own_part
from hedgerow.wire.message_types import WHOAMI


def _num_examples(context: Context) -> int:
    # Known before the node's own data are standardised.
    return own_part(context) if has_own(context) else node_problem(context).num_examples


app = ceps_client(
    node_problem,
    {"evaluate": each(evaluate_own), WHOAMI: whoami(_num_examples, own_introduction), **own_handlers()},
)
