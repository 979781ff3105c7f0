"""The node's side: ClientApps that learn on local data."""

from hedgerow.clients.app import BatchClientApp, introduce, introduced, whoami
from hedgerow.clients.ceps.client import ceps_client
from hedgerow.clients.ceps.problems import LinearRegression, LogisticRegression, TorchProblem
from hedgerow.clients.device import resolve_device
from hedgerow.clients.fedmud.client import fedmud_client
from hedgerow.clients.fedmud.factored_model import FactoredModel, wrap
from hedgerow.clients.gossip import GossipNode, GossipNodeMethod, GossipPlace, Memory, Problem, gossip_app
from hedgerow.clients.gradient_noise import GradientPrivacy, gaussian_variance, noised, privacy_of
from hedgerow.clients.handlers import each
from hedgerow.clients.hsgd.node import hsgd_client
from hedgerow.clients.hsgd.step import Party
from hedgerow.clients.local_task import (
    TASK_TEXTS,
    LocalTask,
    LocalTaskFn,
    frozen_part,
    global_task,
    initial_model,
    local_task,
)
from hedgerow.clients.mods.compress import compress_reply
from hedgerow.clients.mods.guard import Refusal, Reveals, reveals
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.mask import masked_sum_handlers
from hedgerow.clients.mods.update import TrainingMod, TrainResult, UpdateMod
from hedgerow.clients.node_state import NodeState, restore_state, send_state
from hedgerow.clients.scaffold import scaffold_client
from hedgerow.clients.sd_feel.client import sd_feel_client
from hedgerow.clients.similarity_free.client import similarity_free_client
from hedgerow.clients.similarity_free.proximal import parse_inner_lr
from hedgerow.clients.training.batches import batch_indices
from hedgerow.clients.training.optimisers import LOCAL_OPTIMISER_TEXTS, LocalAdamW, LocalSGD
from hedgerow.clients.training.own import TrainingConfig, TrainingData, TrainingLoop
from hedgerow.clients.training.sgd import TrainingMode, local_sgd
from hedgerow.clients.training.work import LocalWork, Loss, Trained, cross_entropy

# Names of earlier states.
Learning, Learnt = TrainHandler, TrainResult

__all__ = [
    "LOCAL_OPTIMISER_TEXTS",
    "TASK_TEXTS",
    "BatchClientApp",
    "FactoredModel",
    "GossipNode",
    "GossipNodeMethod",
    "GossipPlace",
    "GradientPrivacy",
    "LinearRegression",
    "LocalAdamW",
    "LocalSGD",
    "LocalTask",
    "LocalTaskFn",
    "LocalWork",
    "LogisticRegression",
    "Loss",
    "Memory",
    "NodeState",
    "Party",
    "Problem",
    "Refusal",
    "Reveals",
    "TorchProblem",
    "TrainHandler",
    "TrainResult",
    "Trained",
    "TrainingConfig",
    "TrainingData",
    "TrainingLoop",
    "TrainingMod",
    "TrainingMode",
    "UpdateMod",
    "batch_indices",
    "ceps_client",
    "compress_reply",
    "cross_entropy",
    "each",
    "fedmud_client",
    "frozen_part",
    "gaussian_variance",
    "global_task",
    "gossip_app",
    "hsgd_client",
    "initial_model",
    "introduce",
    "introduced",
    "local_sgd",
    "local_task",
    "masked_sum_handlers",
    "noised",
    "parse_inner_lr",
    "privacy_of",
    "resolve_device",
    "restore_state",
    "reveals",
    "scaffold_client",
    "sd_feel_client",
    "send_state",
    "similarity_free_client",
    "whoami",
    "wrap",
]
