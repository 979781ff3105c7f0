import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hedgerow.tasks import SCHEMES, Scheme, load, parse_scheme, partition
from hedgerow.tasks.partitions import capped_dirichlet

EXAMPLES = ("iid", "dirichlet(0.5)", "shards(2)", "labels(2)")
CAPPED = "capped-dirichlet(0.5)"

any_scheme = st.sampled_from(EXAMPLES)
any_seed = st.integers(0, 2**64)


@st.composite
def any_labels(draw):
    num_classes = draw(st.integers(2, 8))
    count = draw(st.integers(100, 400))
    labels = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, num_classes, count)
    assume(np.unique(labels).size == num_classes)
    return labels


@settings(deadline=None, max_examples=100)
@given(
    scheme=any_scheme,
    labels=any_labels(),
    num_partitions=st.integers(4, 12),
    seeds=st.sets(any_seed, min_size=2, max_size=2),
)
def test_every_sample_is_dealt_exactly_once_by_the_seed_and_no_part_is_empty(
    scheme, labels, num_partitions, seeds
):
    seed, other = seeds
    parts = partition(scheme, labels, num_partitions, seed)
    assert len(parts) == num_partitions
    assert np.sort(np.concatenate(parts)).tolist() == list(range(labels.size))
    for part in parts:
        assert part.dtype == np.int64
        assert part.size
        assert (np.diff(part) > 0).all()
    for another, same in ((seed, True), (other, False)):
        again = partition(scheme, labels, num_partitions, another)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True)) == same


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 200), num_partitions=st.integers(1, 200), seed=any_seed)
def test_iid_sizes_differ_by_one_at_most(count, num_partitions, seed):
    assume(num_partitions <= count)
    sizes = [part.size for part in partition("iid", np.zeros(count, int), num_partitions, seed)]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=100)
@given(labels=any_labels(), num_partitions=st.integers(1, 20), k=st.integers(1, 8), seed=any_seed)
def test_labels_gives_k_classes_at_most_and_every_class_to_somebody(labels, num_partitions, k, seed):
    num_classes = np.unique(labels).size
    assume(k <= num_classes <= k * num_partitions)
    assume(np.bincount(labels).min() >= num_partitions)
    held = [np.unique(labels[part]) for part in partition(f"labels({k})", labels, num_partitions, seed)]
    assert all(classes.size == k for classes in held)
    holders = np.bincount(np.concatenate(held), minlength=num_classes)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1


def test_labels_holders_share_a_class_equally():
    labels = np.repeat(np.arange(10), 100)
    for part in partition("labels(2)", labels, 10, seed=3):
        assert sorted(np.unique(labels[part], return_counts=True)[1]) == [50, 50]
    labels = load("mnist-5k").y_train
    parts = partition("labels(1)", labels, 10, seed=0)
    assert sorted(int(labels[part][0]) for part in parts) == list(range(10))
    assert all(part.size == 400 and np.unique(labels[part]).size == 1 for part in parts)


@settings(deadline=None, max_examples=50)
@given(labels=any_labels(), num_partitions=st.integers(1, 10), k=st.integers(1, 5), seed=any_seed)
def test_shards_differ_by_k_samples_at_most_and_span_few_labels(labels, num_partitions, k, seed):
    parts = partition(f"shards({k})", labels, num_partitions, seed)
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= k
    # A chunk of the sorted labels spans two more labels than it contains whole.
    chunk = labels.size // (k * num_partitions) + 1
    smallest = np.bincount(labels).min()
    assert all(np.unique(labels[part]).size <= k * (2 + chunk // smallest) for part in parts)
    pure = np.repeat(np.arange(10), 60)
    assert all(
        np.unique(pure[part]).size <= 2 and part.size == 60 for part in partition("shards(2)", pure, 10, seed)
    )


def test_dirichlet_cuts_each_shuffled_class_at_the_floor_of_the_cumulated_proportions():
    labels = np.repeat(np.arange(3), 200)
    parts = partition("dirichlet(0.5)", labels, 5, seed=7)
    rng = np.random.default_rng(np.random.SeedSequence([7, 0, 0, 2]))
    for label in range(3):
        p = rng.dirichlet([0.5] * 5)
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = [*np.floor(np.cumsum(p)[:-1] * 200).astype(int), 200]
        for part, start, end in zip(parts, [0, *ends], ends, strict=False):
            assert set(part[labels[part] == label]) == set(members[start:end])


def test_dirichlet_class_counts_have_the_variance_of_the_distribution():
    # Var p = (1/n)(1 - 1/n) / (n alpha + 1), with n = 10 nodes and alpha = 0.5: 0.015.
    labels = np.zeros(20_000, int)
    shares = np.concatenate(
        [[part.size / labels.size for part in partition("dirichlet(0.5)", labels, 10, s)] for s in range(300)]
    )
    assert abs(shares.var() - 0.015) < 0.0015


def test_a_draw_that_leaves_a_node_empty_is_repeated_till_it_is_an_error(monkeypatch):
    labels = np.arange(40) % 2
    assert all(part.size for part in partition("dirichlet(0.3)", labels, 8, seed=0))
    with pytest.raises(ValueError, match=r"partition = 'dirichlet\(0.001\)': .* \(last of 1000 draws\)"):
        partition("dirichlet(0.001)", np.zeros(50, int), 40, 0)
    with pytest.raises(ValueError, match=r"have fewer than 10 samples \(last of 1000 draws\)"):
        partition(CAPPED, labels, 8, 0)
    monkeypatch.setattr("hedgerow.tasks.partitions._ATTEMPTS", 1)
    with pytest.raises(ValueError, match=r"have no sample \(last of 1 draws\)"):
        partition("dirichlet(0.3)", labels, 8, seed=0)


@pytest.mark.parametrize(
    ("num_samples", "num_classes", "alpha", "first", "least", "most"),
    [  # CIFAR-10, FMNIST and CIFAR-100: Li et al., Non-IID-1, from NumPy's legacy generator
        (50_000, 10, 0.3, [399, 288, 189, 352, 1648], 89, 1648),
        (60_000, 10, 0.3, [1252, 1061, 600, 821, 747], 133, 1744),
        (50_000, 100, 0.1, [484, 554, 571, 357, 591], 162, 690),
    ],
)
def test_capped_dirichlet_gives_the_golden_sizes(num_samples, num_classes, alpha, first, least, most):
    labels = np.arange(num_samples) % num_classes
    parts = capped_dirichlet(labels, 100, alpha, np.random.RandomState(1234))
    sizes = [part.size for part in parts]
    assert (sizes[:5], min(sizes), max(sizes)) == (first, least, most)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(num_samples))


@settings(deadline=None, max_examples=50)
@given(labels=any_labels(), num_partitions=st.integers(1, 4), seed=any_seed)
def test_capped_dirichlet_deals_every_sample_once_and_ten_at_least_to_each(labels, num_partitions, seed):
    parts = partition(CAPPED, labels, num_partitions, seed)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(labels.size))
    assert all(part.size >= 10 and (np.diff(part) > 0).all() for part in parts)


def test_a_capped_part_that_has_its_share_gets_none_of_the_classes_that_follow():
    # Two classes of 300 for three parts: the share is 200, and some part has it after the first class.
    labels = np.repeat([0, 1], 300)
    capped = 0
    for seed in range(20):
        parts = capped_dirichlet(labels, 3, 0.1, np.random.default_rng(seed))
        for part in parts:
            counts = np.bincount(labels[part], minlength=2)
            if counts[0] >= 200:
                capped += 1
                assert counts[1] == 0
    assert capped > 5


def test_capped_dirichlet_is_keyed_by_seed_and_survives_an_alpha_that_draws_zeros_for_all_open_parts():
    labels = np.repeat(np.arange(8), 50)
    for seed in range(20):
        parts = capped_dirichlet(labels, 8, 1e-4, np.random.default_rng(seed))
        assert sum(part.size for part in parts) == labels.size
    labels = np.arange(1000) % 10
    first, again, other = (partition(CAPPED, labels, 10, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("num_classes", "k", "sizes", "holders"),
    [(10, 3, {498, 499, 500, 501}, 30), (100, 10, {500}, 10)],
)
def test_labels_is_the_papers_non_iid_2(num_classes, k, sizes, holders):
    labels = np.arange(50_000) % num_classes
    parts = partition(f"labels({k})", labels, 100, seed=0)
    held = [frozenset(labels[part]) for part in parts]
    assert {part.size for part in parts} <= sizes
    assert {sum(label in classes for classes in held) for label in range(num_classes)} == {holders}
    assert len(set(held)) > 40  # ties in a fixed order would leave 10 distinct sets


@settings(deadline=None, max_examples=50)
@given(labels=any_labels(), k=st.integers(1, 3), more=st.integers(0, 5), seed=any_seed)
def test_a_ring_deals_every_sample_once_to_holders_of_consecutive_classes(labels, k, more, seed):
    classes = np.unique(labels)
    assume(k <= classes.size)
    parts = partition(f"ring({k})", labels, classes.size - k + 1 + more, seed)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(labels.size))
    for i, part in enumerate(parts):
        assert set(labels[part]) <= {classes[(i + j) % classes.size] for j in range(k)}


def test_a_ring_of_as_many_partitions_as_classes_has_half_of_two_classes_each_or_one():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    for i, part in enumerate(partition("ring(2)", labels, 10, seed=0)):
        assert np.bincount(labels[part], minlength=10)[[i, (i + 1) % 10]].tolist() == [30, 30]
    parts = partition("ring(1)", labels, 10, seed=3)
    assert [set(labels[part].tolist()) for part in parts] == [{i} for i in range(10)]


def test_a_scheme_is_parsed_into_name_and_argument_and_written_as_it_is_read():
    assert parse_scheme("iid") == Scheme("iid", None)
    assert parse_scheme(" dirichlet( 5e-1 ) ") == Scheme("dirichlet", 0.5)
    assert parse_scheme("labels (3)") == Scheme("labels", 3)
    every = (*EXAMPLES, "ring(2)", CAPPED, "source(0.7)", "with-replacement(20)")
    assert parse_scheme("source") == Scheme("source", None)
    assert parse_scheme("source(1)") == Scheme("source", 1.0)
    assert [str(parse_scheme(scheme)) for scheme in every] == list(every)
    assert tuple(parse_scheme(scheme).name for scheme in every) == SCHEMES


@st.composite
def any_sources(draw):
    sizes = draw(st.lists(st.integers(1, 80), min_size=1, max_size=5))
    names = np.repeat([f"site {number}" for number in range(len(sizes))], sizes)
    most = min(12, names.size)
    return np.random.default_rng(0).permutation(names), draw(st.integers(len(sizes), most + len(sizes)))


@settings(deadline=None, max_examples=100)
@given(drawn=any_sources(), share=st.floats(0.01, 1.0), seed=any_seed)
def test_source_gives_a_node_one_source_and_sources_nodes_in_proportion(drawn, share, seed):
    sources, nodes = drawn
    assume(nodes <= sources.size)
    labels = np.zeros(sources.size, int)
    pure, mixed = (partition(s, labels, nodes, seed, sources) for s in ("source", f"source({share})"))
    numbers = np.unique(sources, return_inverse=True)[1]
    own = [np.unique(numbers[part]) for part in pure]
    assert all(number.size == 1 for number in own)
    held, samples = np.bincount(np.concatenate(own)), np.bincount(numbers)
    # No source would have more samples per node than another with one node less.
    assert (samples[:, None] * (held - 1) <= samples * held[:, None])[:, held > 1].all()
    assert [int(number[0]) for number in own] == np.repeat(np.arange(held.size), held).tolist()
    for number, size in enumerate(samples):
        sizes = {part.size for part, of in zip(pure, own, strict=True) if of[0] == number}
        assert sizes <= {size // held[number], -(-size // held[number])}
    for parts in (pure, mixed):
        assert np.sort(np.concatenate(parts)).tolist() == list(range(sources.size))
    for part, other, number in zip(pure, mixed, own, strict=True):
        assert other.size == part.size
        assert np.intersect1d(part, other).size >= round(share * part.size)
        assert (numbers[other] == number).sum() >= round(share * part.size)
    again = partition(f"source({share})", labels, nodes, seed, sources)
    assert all(map(np.array_equal, mixed, again))


def test_the_rest_of_a_node_s_samples_are_of_all_sources_and_follow_from_the_seed():
    sources = np.repeat([3, 1, 2], 1000)
    labels = np.zeros(3000, int)
    parts = partition("source(0.7)", labels, 6, 0, sources)
    for number, part in enumerate(parts):
        counts = np.bincount(sources[part], minlength=4)[1:]
        assert part.size == 500
        # 350 of its own, and 150 of the three alike: 50 each, of which 30 may be missing by chance.
        assert abs(counts[number // 2] - 400) < 30
        assert (np.abs(np.delete(counts, number // 2) - 50) < 30).all()
    other = partition("source(0.7)", labels, 6, 1, sources)
    assert not any(map(np.array_equal, parts, other))


def test_with_replacement_draws_each_partition_by_itself_and_every_sample_as_often():
    labels = np.arange(50) % 10
    many = partition("with-replacement(20)", labels, 10**9, seed=3)  # None is made before it is asked for.
    few = partition("with-replacement(20)", labels, 4, seed=3)
    assert len(many) == 10**9
    assert all(np.array_equal(a, b) for a, b in zip(many[:4], few, strict=True))
    assert all(part.dtype == np.int64 and len(part) == 20 and (np.diff(part) >= 0).all() for part in few)
    assert not np.array_equal(many[0], many[1])
    assert not np.array_equal(many[0], partition("with-replacement(20)", labels, 4, seed=4)[0])
    with pytest.raises(IndexError):
        few[4]
    parts = partition("with-replacement(50)", np.zeros(20, int), 400, seed=0)
    counts = np.bincount(np.concatenate(list(parts)), minlength=20)  # 1000 each, deviation 31
    assert (np.abs(counts - 1000) < 5 * 31).all()


FLOWER = (
    "flwr_datasets:IidPartitioner",
    "flwr_datasets:DirichletPartitioner(alpha=0.5, min_partition_size=1)",
    "flwr_datasets:PathologicalPartitioner(num_classes_per_partition=2)",
)


@pytest.mark.parametrize("scheme", FLOWER)
def test_flowers_partitioners_deal_every_sample_once_and_by_the_seed(scheme):
    labels = np.random.default_rng(0).integers(0, 5, 300)
    parts = partition(scheme, labels, 6, seed=3)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(300))
    again, other = partition(scheme, labels, 6, seed=3), partition(scheme, labels, 6, seed=4)
    assert all(map(np.array_equal, parts, again))
    if "Iid" not in scheme:  # Which deals by order.
        assert not all(map(np.array_equal, parts, other))
    if "Pathological" in scheme:
        assert all(np.unique(labels[part]).size <= 2 for part in parts)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("flwr_datasets:", "partition must be 'flwr_datasets:NAME"),
        ("flwr_datasets:__import__('os')", "partition must be 'flwr_datasets:NAME"),
        ("flwr_datasets:IidPartitioner(seed=open('x'))", "with numbers, texts and lists"),
        ("flwr_datasets:Nope", "partition must name one of .*IidPartitioner"),
        ("flwr_datasets:DirichletPartitioner", "alpha"),
        ("flwr_datasets:SizePartitioner(partition_sizes=[300])", "SizePartitioner"),
    ],
)
def test_a_partitioner_that_flower_has_not_or_refuses_is_one_error(scheme, words):
    with pytest.raises(ValueError, match=words):
        partition(scheme, np.zeros(300, np.int64), 6, seed=0)
