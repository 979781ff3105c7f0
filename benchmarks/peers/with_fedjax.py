"""Google's FedJAX: algorithms.fed_avg over for_each_client.

Modes: ``jit``, its default backend (one client after the other, each step compiled), and ``pmap``, its
parallel one, on two CPU devices. JAX runs ahead of Python; a round ends when its parameters are there.
"""

from importlib.metadata import version

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from task import BATCH, COHORT, LR, Rounds, Task, read_task

# FedJAX 0.0.17 calls it by the name that JAX 0.4.26 deprecated and later versions lack.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map


def lenet(batch):
    """Channels last, as in FedJAX's own models."""
    pool = hk.MaxPool(window_shape=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")
    net = hk.Sequential(
        [
            hk.Conv2D(output_channels=10, kernel_shape=5, padding="VALID"),
            pool,
            jax.nn.relu,
            hk.Conv2D(output_channels=20, kernel_shape=5, padding="VALID"),
            pool,
            jax.nn.relu,
            hk.Flatten(),
            hk.Linear(50),
            jax.nn.relu,
            hk.Linear(10),
        ]
    )
    return net(batch["x"])


def logistic(batch):
    return hk.Linear(10)(hk.Flatten()(batch["x"]))


def haiku_weights(task: Task) -> dict[str, dict[str, np.ndarray]]:
    """Return the task's weights in Haiku's names and layout."""
    w = task.weights
    if task.model == "logistic":
        return {"linear": {"w": w["linear.weight"].T, "b": w["linear.bias"]}}
    # torch flattens channels first, Haiku channels last.
    linear1 = w["linear1.weight"].reshape(50, 20, 4, 4).transpose(2, 3, 1, 0).reshape(320, 50)
    return {
        "conv2_d": {"w": w["conv1.weight"].transpose(2, 3, 1, 0), "b": w["conv1.bias"]},
        "conv2_d_1": {"w": w["conv2.weight"].transpose(2, 3, 1, 0), "b": w["conv2.bias"]},
        "linear": {"w": linear1, "b": w["linear1.bias"]},
        "linear_1": {"w": w["linear2.weight"].T, "b": w["linear2.bias"]},
    }


def main() -> None:
    task, rounds = read_task(), Rounds()
    model = fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform({"lenet": lenet, "logistic": logistic}[task.model]),
        sample_batch={"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int64)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
    )

    def counted(batch):
        rounds.step()
        return batch

    x = task.x.transpose(0, 2, 3, 1)
    data = fedjax.InMemoryFederatedData(
        {client: {"x": x[part], "y": task.y[part]} for client, part in enumerate(task.parts)},
        preprocess_batch=fedjax.BatchPreprocessor([counted]),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, COHORT, seed=task.seed)
    with fedjax.for_each_client_backend(task.mode):
        algorithm = fed_avg.federated_averaging(
            fedjax.model_grad(model),
            fedjax.optimizers.sgd(LR),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH),
        )
    # FedJAX's own shapes are checked against ours here.
    start = jax.tree_util.tree_map(
        lambda own, given: jnp.asarray(given).reshape(own.shape),
        model.init(jax.random.PRNGKey(0)),
        haiku_weights(task),
    )
    state = algorithm.init(start)
    rounds.start()
    for _ in range(task.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        rounds.end()
    logits = model.apply_for_eval(state.params, {"x": task.x_test.transpose(0, 2, 3, 1)})
    accuracy = float(np.mean(np.argmax(logits, 1) == task.y_test))
    rounds.report(accuracy, f"fedjax {version('fedjax')}, jax {version('jax')}")


if __name__ == "__main__":
    main()
