from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import FactoredLayer, LayerShape
from hedgerow.wire.lowrank import LAYOUTS, VARIANTS, exact_product, factored, uniform

LINEAR = ("mud+f", "mud+aad", "mud+bkd+f", "mud+bkd+aad", "lora+f")
FACTORED = tuple(variant for variant in VARIANTS if variant != "dense")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def column(*entries):
    return tensor(*([entry] for entry in entries))


def row(*entries):
    return tensor(entries)


def block(*blocks):
    return torch.stack([tensor(*rows) for rows in blocks])


def matrix_layer(m, n, variant="mud", rank=1):
    return FactoredLayer("w", (m, n), variant, rank=rank)


def kronecker_layer(m, n, variant="mud+bkd", blocks=1, side=2, grid=0):
    return FactoredLayer("w", (m, n), variant, blocks=blocks, side=side, grid=grid)


def factored_sizes(layer):
    return (layer.blocks, layer.side, layer.count) if layer.side else (layer.rank, layer.count)


def normal(shapes, generator, *leading):
    return {
        name: torch.randn(*leading, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def mean(weights, clients):
    return {
        name: sum(p * client[name] for p, client in zip(weights, clients, strict=True)) for name in clients[0]
    }


@st.composite
def weights_shapes(draw):
    if draw(st.booleans()):
        return draw(st.tuples(*[st.integers(1, 13)] * 2))
    return draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)))


@st.composite
def factored_layers(draw, variants=FACTORED):
    layer = LayerShape("w", draw(weights_shapes()))
    rho = draw(st.floats(0.01, 1))
    return factored(layer, draw(st.sampled_from(variants)), rho, draw(st.sampled_from(LAYOUTS)))


seeds = st.integers(0, 2**32)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# Sizes.


@pytest.mark.parametrize(
    ("shape", "rho", "r", "r_f", "kronecker", "kronecker_f", "para"),
    [  # the golden sizes of one layer: rank or (blocks, side, reachable), and scalars
        ((64, 32, 3, 3), 1 / 32, (2, 576), (6, 576), (5, 8, 5, 640), (18, 6, 648), (1, 576)),
        ((128, 64, 3, 3), 1 / 32, (4, 2304), (12, 2304), (18, 8, 18, 2304), (72, 6, 2592), (2, 2304)),
        ((256, 128, 3, 3), 1 / 32, (8, 9216), (24, 9216), (72, 8, 72, 9216), (288, 6, 10368), (4, 9216)),
        (
            (512, 512, 3, 3), 1 / 32,
            (24, 73728), (48, 73728), (576, 8, 576, 73728), (2304, 6, 82944), (12, 73728),
        ),
        ((10, 1024), 1 / 32, (1, 1034), (1, 1024), (3, 8, 3, 384), (10, 6, 360), (1, 2068)),
        ((128, 64, 3, 3), 1 / 16, (8, 4608), (24, 4608), (72, 6, 57, 5184), (288, 4, 4608), (4, 4608)),
        (
            (256, 128, 3, 3), 1 / 8,
            (32, 36864), (96, 36864), (1152, 4, 1152, 36864), (4608, 3, 41472), (16, 36864),
        ),
        ((64, 32, 3, 3), 1 / 4, (16, 4608), (48, 4608), (288, 3, 228, 5184), (1152, 2, 4608), (8, 4608)),
        ((64, 32, 3, 3), 1 / 64, (1, 288), (3, 288), (2, 10, 2, 400), (5, 8, 320), (1, 576)),
    ],
)  # fmt: skip
def test_a_ratio_gives_a_layer_its_golden_sizes(shape, rho, r, r_f, kronecker, kronecker_f, para):
    plain = {variant: factored(LayerShape("w", shape), variant, rho, "flat") for variant in FACTORED}
    found = {variant: factored_sizes(layer) for variant, layer in plain.items()}
    m, n = plain["mud"].m, plain["mud"].n
    blocks, side, reachable, count = kronecker
    assert found == {
        **dict.fromkeys(("mud", "mud+aad", "lmt", "lora"), r), "mud+f": r_f, "para": para,
        # FFA-LoRA sends the other side: that of the transposed matrix.
        "lora+f": factored_sizes(factored(LayerShape("w", (m, n)[::-1]), "mud+f", rho, "flat")),
        **dict.fromkeys(("mud+bkd", "mud+bkd+aad"), (blocks, side, count)), "mud+bkd+f": kronecker_f,
    }  # fmt: skip
    assert plain["mud+bkd"].reachable == plain["mud+bkd+aad"].reachable == reachable


@settings(deadline=None)
@given(layer=factored_layers())
def test_sizes_cover_the_weight_and_the_side_is_the_least_that_does(layer):
    assert (
        layer.delta(
            {name: torch.zeros(shape) for name, shape in layer.trainable.items()},
            {name: torch.zeros(shape) for name, shape in layer.frozen.items()},
        ).shape
        == layer.shape
    )
    if layer.side:
        assert layer.blocks * layer.side**4 >= layer.size > layer.blocks * (layer.side - 1) ** 4
        assert 1 <= layer.reachable <= layer.blocks
        assert not layer.grid or layer.grid**2 == layer.blocks
    else:
        assert layer.rank >= 1


# Goldens G1 to G9.


def test_golden_g1_and_g2_the_mean_of_factors_misses_the_mean_of_products_by_their_covariance():
    for layer, weights, clients, wanted, got in [
        (
            matrix_layer(2, 2),
            (0.5, 0.5),
            [{"U": column(1, 0), "V": row(1, 0)}, {"U": column(0, 1), "V": row(0, 1)}],
            tensor([0.5, 0], [0, 0.5]),
            tensor([0.25, 0.25], [0.25, 0.25]),
        ),
        (
            matrix_layer(3, 2),
            (0.25, 0.75),
            [{"U": column(1.5, 2, 0), "V": row(2, 0)}, {"U": column(0.5, 3, -1), "V": row(0, 4)}],
            tensor([0.75, 1.5], [1, 9], [0, -3]),
            tensor([0.375, 2.25], [1.375, 8.25], [-0.375, -2.25]),
        ),
    ]:
        average = mean(weights, clients)
        assert torch.equal(layer.delta(average, {}), got)
        assert torch.equal(
            sum(p * layer.delta(one, {}) for p, one in zip(weights, clients, strict=True)), wanted
        )
        covariance = sum(
            p * layer.delta({name: one[name] - average[name] for name in one}, {})
            for p, one in zip(weights, clients, strict=True)
        )
        assert torch.equal(wanted - got, covariance)


def test_golden_g3_decoupled_factors_average_as_updates_do():
    layer, weights = matrix_layer(3, 2, "mud+aad"), (0.25, 0.75)
    frozen = {"U~": column(3, 0, 1), "V~": row(1, -2)}
    clients = [{"U": column(1, 0, 2), "V": row(1, 1)}, {"U": column(0, -1, 4), "V": row(0, 2)}]
    first, second = (layer.delta(client, frozen) for client in clients)
    expected = tensor([1, 4.75], [-0.75, 1.5], [3.75, -5.25])
    assert torch.equal(first, tensor([4, 1], [0, 0], [3, -3]))
    assert torch.equal(second, tensor([0, 6], [-1, 2], [4, -6]))
    assert torch.equal(0.25 * first + 0.75 * second, expected)
    assert torch.equal(layer.delta(mean(weights, clients), frozen), expected)
    assert torch.linalg.matrix_rank(first) == 2 == layer.rank_bound()


def test_golden_g4_decoupled_blocks_average_as_updates_do_and_plain_ones_do_not():
    layer, weights = kronecker_layer(4, 4, "mud+bkd+aad"), (0.5, 0.5)
    frozen = {"U~": block([[1, 0], [2, 1]]), "V~": block([[1, 1], [0, 1]])}
    clients = [
        {"U": block([[0, 1], [0, 0]]), "V": block([[1, 0], [0, 0]])},
        {"U": block([[2, 0], [0, 0]]), "V": block([[0, 0], [0, 3]])},
    ]
    expected = tensor([1.5, 1, 0.5, 0.5], [0, 2.5, 0, 0.5], [1, 0, 0.5, 0], [0, 3, 0, 1.5])
    assert torch.equal(layer.delta(mean(weights, clients), frozen), expected)
    assert torch.equal(sum(0.5 * layer.delta(client, frozen) for client in clients), expected)
    plain = replace(layer, variant="mud+bkd")
    bias = sum(0.5 * plain.delta(client, {}) for client in clients) - plain.delta(mean(weights, clients), {})
    assert torch.linalg.norm(bias).item() == pytest.approx(1.767767, abs=1e-6)


FOUR_BLOCKS = {
    "U": block([[1, 2], [3, 4]], [[1, 0], [0, -1]], [[2, 0], [1, 1]], [[0, 1], [1, 0]]),
    "V": block([[0, 1], [1, 1]], [[2, 3], [4, 5]], [[1, 1], [0, 1]], [[1, 2], [3, 4]]),
}
FLAT = tensor([0, 1, 0, 2, 1, 1, 2], [2, 0, 3, 0, 4, 3, 3], [4, 4, 2, 3, 0, 0, 4], [5, 0, 0, 0, 0, -2, -3])
TILED = tensor([0, 1, 0, 2, 2, 3, 0], [0, 1, 1, 2, 2, 4, 5], [0, 0, 0, 3, 0, 4, 0], [0, -2, -3, 3, 3, 4, 4])


def test_golden_g5_the_layouts_place_the_same_blocks_differently():
    two = {name: blocks[:2] for name, blocks in FOUR_BLOCKS.items()}
    tiled = kronecker_layer(4, 7, blocks=4, grid=2)
    assert torch.equal(kronecker_layer(4, 7, blocks=2).delta(two, {}), FLAT)
    assert torch.equal(kronecker_layer(4, 7, blocks=4).delta(FOUR_BLOCKS, {}), FLAT)
    assert torch.equal(tiled.delta(FOUR_BLOCKS, {}), TILED)
    assert tiled.reachable == 2
    assert torch.equal(replace(tiled, blocks=2).delta(two, {}), TILED)
    whole = kronecker_layer(8, 8, blocks=4, grid=2)
    assert torch.linalg.matrix_rank(whole.delta(FOUR_BLOCKS, {})) == 8


def test_golden_g6_what_exceeds_the_weight_is_cut_off_and_has_no_gradient():
    layer = kronecker_layer(3, 5)
    factors = {"U": block([[1, 2], [3, 4]]), "V": block([[5, 6], [7, 8]]).requires_grad_()}
    delta = layer.delta(factors, {})
    delta.sum().backward()
    assert torch.equal(delta, tensor([5, 6, 10, 12, 7], [8, 14, 16, 15, 18], [20, 24, 21, 24, 28]))
    assert torch.equal(factors["V"].grad, block([[10, 10], [10, 6]]))


def test_golden_g7_kronecker_gradients_and_a_decoupled_step():
    G = torch.arange(1, 17, dtype=torch.float64).reshape(4, 4)
    frozen = {"U~": block([[1, 0], [2, 1]]), "V~": block([[1, 1], [0, 1]])}
    factors = {name: torch.zeros(1, 2, 2, dtype=torch.float64, requires_grad=True) for name in "UV"}
    layer = kronecker_layer(4, 4, "mud+bkd+aad")
    layer.delta(factors, frozen).backward(G)
    assert torch.equal(factors["V"].grad, block([[30, 34], [46, 50]]))
    assert torch.equal(factors["U"].grad, block([[9, 15], [33, 39]]))
    step = layer.delta({name: -0.01 * factors[name].grad for name in "UV"}, frozen)
    expected = tensor(
        [-0.39, -0.43, -0.15, -0.15],
        [-0.46, -0.59, 0, -0.15],
        [-0.93, -1.01, -0.69, -0.73],
        [-0.92, -1.33, -0.46, -0.89],
    )
    assert torch.allclose(step, expected, rtol=0, atol=1e-12)


def test_golden_g9_a_convolution_s_matrix_is_its_buffer_in_row_major_order():
    layer = FactoredLayer("conv", (2, 3, 2, 2), "lmt", rank=4)
    matrix = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    weight = layer.delta({"U": torch.eye(4, dtype=torch.float64), "V": matrix}, {})
    assert torch.equal(weight, torch.arange(24, dtype=torch.float64).reshape(2, 3, 2, 2))


# Properties.


def kronecker_by_hand(layer, left, right):
    blocks = [np.kron(u, v) for u, v in zip(left.numpy(), right.numpy(), strict=True)]
    if layer.grid:
        rows = [blocks[i : i + layer.grid] for i in range(0, layer.blocks, layer.grid)]
        buffer = np.block(rows).ravel()
    else:
        buffer = np.concatenate([one.ravel() for one in blocks])
    return torch.from_numpy(buffer[: layer.size].reshape(layer.shape).copy())


def by_hand(layer, trainable, frozen):
    every = {**trainable, **frozen}
    if layer.variant == "para":
        return ((every["X1"] @ every["Y1"]) * (every["X2"] @ every["Y2"])).reshape(layer.shape)
    pairs = [("U", "V")]
    if layer.variant == "lora+f":
        pairs = [("U", "V~")]
    elif layer.variant.endswith("+f"):
        pairs = [("U~", "V")]
    elif layer.variant.endswith("+aad"):
        pairs = [("U", "V~"), ("U~", "V")]
    if layer.side:
        return sum(kronecker_by_hand(layer, every[u], every[v]) for u, v in pairs)
    return sum(every[u] @ every[v] for u, v in pairs).reshape(layer.shape)


@settings(deadline=None, max_examples=120)
@given(layer=factored_layers(), seed=seeds)
def test_the_update_is_the_one_written_out_block_by_block_within_its_rank_bound(layer, seed):
    generator = seeded(seed)
    trainable, frozen = normal(layer.trainable, generator), normal(layer.frozen, generator)
    update = layer.delta(trainable, frozen)
    assert torch.allclose(update, by_hand(layer, trainable, frozen), rtol=1e-12, atol=1e-12)
    assert torch.linalg.matrix_rank(update.reshape(layer.m, layer.n)) <= layer.rank_bound()


@settings(deadline=None, max_examples=60)
@given(layer=factored_layers(LINEAR), seed=seeds, clients=st.integers(2, 4))
def test_a_mean_of_decoupled_or_freezing_factors_is_the_mean_of_their_updates(layer, seed, clients):
    generator = seeded(seed)
    frozen = normal(layer.frozen, generator)
    every = [normal(layer.trainable, generator) for _ in range(clients)]
    weights = torch.rand(clients, generator=generator, dtype=torch.float64)
    weights /= weights.sum()
    wanted = sum(p * layer.delta(one, frozen) for p, one in zip(weights, every, strict=True))
    assert torch.allclose(layer.delta(mean(weights, every), frozen), wanted, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(layer=factored_layers(("mud", "mud+bkd", "lmt", "lora")), seed=seeds, agree=st.booleans())
def test_the_bias_of_plain_factors_is_their_covariance_and_nil_where_clients_agree_on_one(layer, seed, agree):
    generator = seeded(seed)
    weights = (0.2, 0.5, 0.3)
    clients = [normal(layer.trainable, generator) for _ in weights]
    if agree:
        clients = [{**client, "U": clients[0]["U"]} for client in clients]
    average = mean(weights, clients)

    def weighted(updates):
        return sum(p * update for p, update in zip(weights, updates, strict=True))

    bias = weighted(layer.delta(one, {}) for one in clients) - layer.delta(average, {})
    covariance = weighted(
        layer.delta({name: one[name] - average[name] for name in one}, {}) for one in clients
    )
    assert torch.allclose(bias, covariance, rtol=1e-12, atol=1e-12)
    assert not agree or bias.abs().max() < 1e-12


@settings(deadline=None, max_examples=60)
@given(shape=weights_shapes(), seed=seeds, rank=st.integers(1, 5))
def test_gradients_of_the_matrix_forms_are_the_papers(shape, seed, rank):
    generator = seeded(seed)
    aad = FactoredLayer("w", shape, "mud+aad", rank=rank)
    G = torch.randn(aad.m, aad.n, generator=generator, dtype=torch.float64)

    def gradients(layer):
        trainable = {k: x.requires_grad_() for k, x in normal(layer.trainable, generator).items()}
        frozen = normal(layer.frozen, generator)
        layer.delta(trainable, frozen).backward(G.reshape(shape))
        return (
            {k: x.grad for k, x in trainable.items()},
            {k: x.detach() for k, x in trainable.items()},
            frozen,
        )

    gradient, at, _ = gradients(replace(aad, variant="mud"))  # eq. (20)
    assert torch.allclose(gradient["U"], G @ at["V"].T)
    assert torch.allclose(gradient["V"], at["U"].T @ G)
    gradient, _, frozen = gradients(replace(aad, variant="mud+f"))
    assert torch.allclose(gradient["V"], frozen["U~"].T @ G)
    gradient, _, frozen = gradients(aad)
    assert torch.allclose(gradient["U"], G @ frozen["V~"].T)
    assert torch.allclose(gradient["V"], frozen["U~"].T @ G)


@settings(deadline=None, max_examples=60)
@given(layer=factored_layers(("mud+bkd", "mud+bkd+f", "mud+bkd+aad")), seed=seeds)
def test_blocks_that_cannot_be_reached_have_no_gradient_and_a_tight_layer_has_the_others(layer, seed):
    generator = seeded(seed)
    trainable = {k: x.requires_grad_() for k, x in normal(layer.trainable, generator).items()}
    frozen, tight = normal(layer.frozen, generator), replace(layer, blocks=layer.reachable)
    update = layer.delta(trainable, frozen)
    update.sum().backward()
    for factor in trainable.values():
        assert not factor.grad[layer.reachable :].any()
        assert factor.grad[: layer.reachable].flatten(1).any(dim=1).all()
    reached = [{k: x[: layer.reachable] for k, x in part.items()} for part in (trainable, frozen)]
    assert tight.reachable == tight.blocks
    assert torch.equal(tight.delta(*reached), update)


def test_forms_attain_their_rank_bounds_and_merges_add_rank_after_rank_until_it_is_full():
    generator = seeded(0)
    for layer, rank in (
        (matrix_layer(30, 20, "mud+aad", rank=3), 6),
        (matrix_layer(20, 24, "para", rank=4), 16),
        *(
            (factored(LayerShape("w", shape), "mud+bkd", 1 / 32, layout), shape[2] * min(shape[:2]))
            for shape in [(64, 32, 3, 3), (128, 64, 3, 3)]
            for layout in LAYOUTS
        ),
    ):
        update = layer.delta(normal(layer.trainable, generator), normal(layer.frozen, generator))
        assert torch.linalg.matrix_rank(update.reshape(layer.m, layer.n)) == rank == layer.rank_bound()
    assert matrix_layer(20, 24, "para", rank=4).count == 352
    layer, total, ranks = matrix_layer(30, 20, rank=3), torch.zeros(30, 20, dtype=torch.float64), []
    for _ in range(8):
        total = total + layer.delta(normal(layer.trainable, generator), {})
        ranks.append(int(torch.linalg.matrix_rank(total)))
    assert ranks == [3, 6, 9, 12, 15, 18, 20, 20]
    assert ranks == [layer.rank_bound(merges) for merges in range(1, 9)]


@settings(deadline=None, max_examples=40)
@given(layer=factored_layers(), seed=seeds)
def test_a_leading_axis_holds_one_node_an_entry(layer, seed):
    generator = seeded(seed)
    trainable, frozen = normal(layer.trainable, generator, 3), normal(layer.frozen, generator)
    stacked = layer.delta(trainable, frozen)
    mapped = torch.vmap(lambda one: layer.delta(one, frozen))(trainable)
    assert stacked.shape == mapped.shape == (3, *layer.shape)
    for node in range(3):
        one = layer.delta({name: value[node] for name, value in trainable.items()}, frozen)
        assert torch.allclose(stacked[node], one, rtol=1e-12, atol=1e-12)
        assert torch.allclose(mapped[node], one, rtol=1e-12, atol=1e-12)


# Random factors.


@pytest.mark.parametrize(
    ("reset_index", "name", "expected"),
    [
        (0, "U", [0.01145139, -0.05525275, -0.04133308, 0.01595115, 0.06236303, 0.03273209]),
        (0, "V", [-0.00938173, 0.07261784, -0.08261267, -0.03863930, 0.07281233, -0.00922422]),
        (1, "U", [-0.03430911, 0.03856606, 0.04905699, -0.06934778, 0.00165700, 0.00122995]),
    ],
)
def test_golden_g10_random_factors(reset_index, name, expected):
    drawn = uniform((2, 3), 0.1, run_seed=1234, reset_index=reset_index, layer=0, name=name)
    assert drawn.dtype == torch.float32
    assert drawn.flatten().tolist() == pytest.approx(expected, abs=5e-9)


def test_runs_resets_layers_and_roles_have_streams_of_their_own():
    base = {"run_seed": 1, "reset_index": 2, "layer": 3, "name": "U"}
    drawn = [
        uniform((50,), 1.0, **(base | other))
        for other in ({}, {"run_seed": 2}, {"reset_index": 3}, {"layer": 4}, {"name": "V"})
    ]
    drawn += [uniform((50,), 1.0, **(base | {"name": name})) for name in ("X2", "Y2")]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.5


@settings(deadline=None, max_examples=30)
@given(a=st.floats(1e-3, 10), seed=seeds)
def test_random_factors_are_uniform_within_a(a, seed):
    drawn = uniform((20, 100), a, run_seed=seed, reset_index=0, layer=0, name="U")
    assert drawn.abs().max() <= a * (1 + 1e-6)
    assert drawn.square().mean().item() == pytest.approx(a * a / 3, rel=0.15)


# The product whose bits are the same everywhere.


@settings(deadline=None, max_examples=40)
@given(batch=st.integers(1, 3), m=st.integers(1, 40), k=st.integers(1, 6), n=st.integers(1, 3000), seed=seeds)
def test_the_exact_product_rounds_after_every_operation_in_order(batch, m, k, n, seed):
    left = torch.randn(batch, m, k, generator=seeded(seed))
    right = torch.randn(batch, k, n, generator=seeded(seed + 1))
    expected = np.zeros((batch, m, n), np.float32)
    for i in range(k):
        term = left.numpy()[:, :, i : i + 1] * right.numpy()[:, i : i + 1]
        expected = term if i == 0 else expected + term
    assert np.array_equal(exact_product(left, right).numpy(), expected)
