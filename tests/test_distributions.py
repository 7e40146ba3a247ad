"""Policies over each action space against naive loops, enumeration, quadrature, and counted samples."""

import itertools
import math

import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import ops

from rl import backend
from rl.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
    distribution_for,
)
from tests.backends import value_and_gradient

SEEDS = [0, 1, 2]
ROWS = [1, 5, 16]  # of the batch, one for each seed
NB_DRAWS = 100_000

# ---- Twins: the same by loops over rows, components and actions, in float64 ---------------------------------------


def softmax_twin(logits):
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def argmax_twin(values):
    best = 0
    for i, value in enumerate(values):
        if value > values[best]:
            best = i
    return best


class CategoricalTwin:
    def __init__(self, n):
        self.distribution = Categorical(n)
        self.nb_outputs, self.nb_noise, self.shape = n, n, ()
        self.actions = list(range(n))

    def log_prob(self, row, action):
        top = max(row)
        return row[action] - top - math.log(sum(math.exp(x - top) for x in row))

    def entropy(self, row):
        return -sum(p * self.log_prob(row, a) for a, p in enumerate(softmax_twin(row)) if p > 0)

    def mode(self, row):
        return argmax_twin(row)

    def sample(self, row, noise):
        # In float32, as the sum is in the library: else another action may win where two are close.
        return argmax_twin([np.float32(x) + np.float32(g) for x, g in zip(row, noise, strict=True)])

    def noise_cdf(self, x):
        return math.exp(-math.exp(-x))


class MultiCategoricalTwin:
    def __init__(self, nvec):
        self.distribution = MultiCategorical(nvec)
        self.parts = [CategoricalTwin(n) for n in nvec]
        self.nb_outputs, self.nb_noise, self.shape = sum(nvec), sum(nvec), (len(nvec),)
        self.actions = list(itertools.product(*(range(n) for n in nvec)))
        self.noise_cdf = self.parts[0].noise_cdf

    def split(self, row):
        pieces, start = [], 0
        for part in self.parts:
            pieces.append(row[start : start + part.nb_outputs])
            start += part.nb_outputs
        return pieces

    def log_prob(self, row, action):
        return sum(t.log_prob(x, a) for t, x, a in zip(self.parts, self.split(row), action, strict=True))

    def entropy(self, row):
        return sum(t.entropy(x) for t, x in zip(self.parts, self.split(row), strict=True))

    def mode(self, row):
        return [t.mode(x) for t, x in zip(self.parts, self.split(row), strict=True)]

    def sample(self, row, noise):
        pieces = zip(self.parts, self.split(row), self.split(noise), strict=True)
        return [t.sample(x, g) for t, x, g in pieces]


class BernoulliTwin:
    def __init__(self, k):
        self.distribution = Bernoulli(k)
        self.nb_outputs, self.nb_noise, self.shape = k, k, (k,)
        self.actions = list(itertools.product((0, 1), repeat=k))

    def log_prob(self, row, action):
        total = 0.0
        for x, on in zip(row, action, strict=True):
            margin = x if on else -x
            total += min(margin, 0) - math.log1p(math.exp(-abs(margin)))
        return total

    def entropy(self, row):
        total = 0.0
        for x in row:
            off, on = softmax_twin([0.0, x])
            total -= sum(p * math.log(p) for p in (off, on) if p > 0)
        return total

    def mode(self, row):
        return [int(x > 0) for x in row]

    def sample(self, row, noise):
        return [int(np.float32(x) + np.float32(n) > 0) for x, n in zip(row, noise, strict=True)]

    def noise_cdf(self, x):
        return 1 / (1 + math.exp(-x))


class DiagGaussianTwin:
    def __init__(self, a):
        self.distribution = DiagGaussian(a)
        self.nb_outputs, self.nb_noise, self.shape = 2 * a, a, (a,)

    def mean_std(self, row):
        half = len(row) // 2
        return [(row[i], math.exp(row[half + i])) for i in range(half)]

    def log_prob(self, row, action):
        total = 0.0
        for x, (mean, std) in zip(action, self.mean_std(row), strict=True):
            total += math.log(math.exp(-((x - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi)))
        return total

    def entropy(self, row):
        return sum(0.5 * math.log(2 * math.pi * math.e * std**2) for _, std in self.mean_std(row))

    def mode(self, row):
        return [mean for mean, _ in self.mean_std(row)]

    def sample(self, row, noise):
        return [mean + std * n for n, (mean, std) in zip(noise, self.mean_std(row), strict=True)]

    def noise_cdf(self, x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))


DISCRETE = {
    "categorical-1": CategoricalTwin(1),
    "categorical-3": CategoricalTwin(3),
    "categorical-7": CategoricalTwin(7),
    "multi-4": MultiCategoricalTwin((4,)),
    "multi-2-3": MultiCategoricalTwin((2, 3)),
    "multi-3-1-2": MultiCategoricalTwin((3, 1, 2)),
    "bernoulli-1": BernoulliTwin(1),
    "bernoulli-2": BernoulliTwin(2),
    "bernoulli-4": BernoulliTwin(4),
}
GAUSSIAN = {f"gaussian-{a}": DiagGaussianTwin(a) for a in (1, 2, 5)}
ALL = DISCRETE | GAUSSIAN

each = pytest.mark.parametrize("twin", ALL.values(), ids=ALL)
each_discrete = pytest.mark.parametrize("twin", DISCRETE.values(), ids=DISCRETE)
each_gaussian = pytest.mark.parametrize("twin", GAUSSIAN.values(), ids=GAUSSIAN)
each_seed = pytest.mark.parametrize("seed", SEEDS)


# ---- Helpers ------------------------------------------------------------------------------------------------------


def some_outputs(twin, seed, nb_rows=None):
    rng = np.random.default_rng(1000 + seed)
    return rng.normal(0, 1, (nb_rows or ROWS[seed], twin.nb_outputs)).astype(np.float32)


def some_actions(twin, seed, nb_rows):
    rng = np.random.default_rng(2000 + seed)
    if twin in GAUSSIAN.values():
        return rng.normal(0, 2, (nb_rows, *twin.shape)).astype(np.float32)
    return np.array(twin.actions, np.int32)[rng.integers(len(twin.actions), size=nb_rows)]


def loop(function, *arrays):
    """What a twin says about each row."""
    rows = zip(*(x.tolist() for x in arrays), strict=True)
    return np.array([function(*row) for row in rows])


def methods(distribution):
    """All four methods of tensors as one function, to be compiled once."""

    def function(outputs, noise, action):
        return (
            distribution.sample(outputs, noise),
            distribution.mode(outputs),
            distribution.log_prob(outputs, action),
            distribution.entropy(outputs),
        )

    return function


def gradient(function, outputs):
    """The gradient of the sum of a function of outputs, by one SGD step of 1 from a shift of 0."""
    shift = keras.Variable(np.zeros(outputs.shape, np.float32))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([shift])
    loss, _ = backend.minimize(
        lambda: (ops.sum(function(ops.convert_to_tensor(outputs) + shift)), None), [shift], optimizer
    )
    assert np.isfinite(backend.to_numpy(loss)), "the loss or its gradient is not finite"
    return -backend.to_numpy(shift.value)


def probabilities(twin, row):
    """The library's probability of every action under one row of outputs."""
    outputs = np.repeat(row[None], len(twin.actions), axis=0)
    return np.exp(backend.to_numpy(twin.distribution.log_prob(outputs, np.array(twin.actions, np.int32))).astype(float))


def index_of(twin, actions):
    """The position of each action among the twin's."""
    table = {a: i for i, a in enumerate(twin.actions)}
    return np.array([table[a if isinstance(a, int) else tuple(a)] for a in actions.tolist()])


def draw(twin, row, seed, nb_draws=NB_DRAWS):
    noise = twin.distribution.noise(np.random.default_rng(seed), nb_draws)
    return backend.to_numpy(twin.distribution.sample(np.repeat(row[None], nb_draws, axis=0), noise))


def assert_counts_fit(counts, p):
    """Pearson's statistic against its quantile at 4 sigma (Wilson and Hilferty 1931), and each count at 4 sigma."""
    n = counts.sum()
    sigma = np.sqrt(n * p * (1 - p))
    # Of many cells, one is beyond 4 sigma now and then; and p is of float32 where a sole action has sigma 0.
    assert np.all(np.abs(counts - n * p) <= (4 if len(p) < 20 else 5) * sigma + 1e-6 * n)
    if len(p) > 1:
        dof = len(p) - 1
        limit = dof * (1 - 2 / (9 * dof) + 4 * math.sqrt(2 / (9 * dof))) ** 3
        assert ((counts - n * p) ** 2 / (n * p)).sum() < limit


# ---- Against the twins --------------------------------------------------------------------------------------------


@each
@each_seed
def test_methods_equal_loops(twin, seed):
    outputs = some_outputs(twin, seed)
    nb_rows = len(outputs)
    noise = twin.distribution.noise(np.random.default_rng(seed), nb_rows)
    action = some_actions(twin, seed, nb_rows)
    sample, mode, log_prob, entropy = (backend.to_numpy(x) for x in methods(twin.distribution)(outputs, noise, action))

    kind = np.float32 if twin in GAUSSIAN.values() else np.int32
    for x in (sample, mode):
        assert x.shape == (nb_rows, *twin.shape) and x.dtype == kind
    for x in (log_prob, entropy):
        assert x.shape == (nb_rows,) and x.dtype == np.float32

    np.testing.assert_allclose(sample, loop(twin.sample, outputs, noise), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mode, loop(twin.mode, outputs), rtol=1e-6)
    np.testing.assert_allclose(log_prob, loop(twin.log_prob, outputs, action), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, loop(twin.entropy, outputs), rtol=1e-5, atol=1e-5)


@each
def test_compiled_with_xla_equals_eager(twin):
    function = methods(twin.distribution)
    compiled = backend.compile_function(function, [], jit_compile=True)
    for seed in SEEDS:
        outputs = some_outputs(twin, seed, 6)
        noise = twin.distribution.noise(np.random.default_rng(seed), 6)
        action = some_actions(twin, seed, 6)
        for got, want in zip(compiled(outputs, noise, action), function(outputs, noise, action), strict=True):
            want = backend.to_numpy(want)
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    assert compiled.nb_traces == 1


@each
@each_seed
def test_gradients_equal_central_differences_of_the_twins(twin, seed):
    outputs = some_outputs(twin, seed, 3)
    action = some_actions(twin, seed, 3)
    cases = [
        (lambda o: twin.distribution.log_prob(o, action), lambda row, a: twin.log_prob(row, a)),
        (twin.distribution.entropy, lambda row, a: twin.entropy(row)),
    ]
    for function, naive in cases:
        want = np.zeros(outputs.shape)
        for b, j in np.ndindex(*outputs.shape):
            row, a = outputs[b].astype(float), action[b].tolist()
            step = np.zeros(len(row))
            step[j] = 1e-5
            want[b, j] = (naive((row + step).tolist(), a) - naive((row - step).tolist(), a)) / 2e-5
        np.testing.assert_allclose(gradient(function, outputs), want, rtol=1e-4, atol=1e-5)


@each_discrete
@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_log_prob_takes_actions_of_any_number_type(twin, dtype):
    outputs = some_outputs(twin, 2)
    action = some_actions(twin, 2, len(outputs))
    got = backend.to_numpy(twin.distribution.log_prob(outputs, action.astype(dtype)))
    np.testing.assert_array_equal(got, backend.to_numpy(twin.distribution.log_prob(outputs, action)))


@each
def test_rows_do_not_touch_each_other(twin):
    outputs = some_outputs(twin, 2)
    noise = twin.distribution.noise(np.random.default_rng(2), len(outputs))
    action = some_actions(twin, 2, len(outputs))
    together = methods(twin.distribution)(outputs, noise, action)
    for b in range(len(outputs)):
        alone = methods(twin.distribution)(outputs[b : b + 1], noise[b : b + 1], action[b : b + 1])
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_allclose(backend.to_numpy(one)[0], backend.to_numpy(many)[b], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("distribution", "single", "split_outputs", "split_action"),
    [
        (MultiCategorical((2, 3, 4)), [Categorical(n) for n in (2, 3, 4)], [[0, 1], [2, 3, 4], [5, 6, 7, 8]], None),
        (Bernoulli(3), [Bernoulli(1)] * 3, [[0], [1], [2]], 1),
        (DiagGaussian(3), [DiagGaussian(1)] * 3, [[0, 3], [1, 4], [2, 5]], 1),
    ],
    ids=["multi", "bernoulli", "gaussian"],
)
@each_seed
def test_log_prob_and_entropy_sum_over_components(distribution, single, split_outputs, split_action, seed):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(8, distribution.nb_outputs)).astype(np.float32)
    action = backend.to_numpy(distribution.sample(outputs, distribution.noise(rng, 8)))
    log_prob, entropy = np.zeros(8), np.zeros(8)
    for k, (part, columns) in enumerate(zip(single, split_outputs, strict=True)):
        mine = action[:, k] if split_action is None else action[:, k : k + 1]
        log_prob += backend.to_numpy(part.log_prob(outputs[:, columns], mine))
        entropy += backend.to_numpy(part.entropy(outputs[:, columns]))
    np.testing.assert_allclose(backend.to_numpy(distribution.log_prob(outputs, action)), log_prob, rtol=1e-5)
    np.testing.assert_allclose(backend.to_numpy(distribution.entropy(outputs)), entropy, rtol=1e-5)


# ---- They are distributions ---------------------------------------------------------------------------------------


@each_discrete
@each_seed
def test_probabilities_of_all_actions_sum_to_one_and_give_the_entropy(twin, seed):
    for row in some_outputs(twin, seed, 3):
        p = probabilities(twin, row)
        assert p.sum() == pytest.approx(1, abs=1e-6)
        entropy = backend.to_numpy(twin.distribution.entropy(row[None]))[0]
        assert entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


@each_seed
def test_gaussian_density_integrates_to_one_and_gives_the_entropy_and_moments(seed):
    distribution = DiagGaussian(1)
    for row in some_outputs(GAUSSIAN["gaussian-1"], seed, 3):
        mean, std = float(row[0]), math.exp(row[1])
        x = np.linspace(mean - 8 * std, mean + 8 * std, 4001)
        log_p = backend.to_numpy(distribution.log_prob(np.repeat(row[None], len(x), 0), x[:, None].astype(np.float32)))
        p = np.exp(log_p.astype(float))
        assert np.trapezoid(p, x) == pytest.approx(1, abs=1e-5)
        assert np.trapezoid(p * x, x) == pytest.approx(mean, abs=1e-5 * (1 + std))
        assert np.trapezoid(p * (x - mean) ** 2, x) == pytest.approx(std**2, rel=1e-4)
        entropy = backend.to_numpy(distribution.entropy(row[None]))[0]
        assert entropy == pytest.approx(np.trapezoid(-p * log_p, x), abs=1e-4)


def test_known_values():
    """Numbers that need no twin."""

    def number(x):
        return float(backend.to_numpy(x)[0])

    zeros = np.zeros((1, 8), np.float32)
    assert number(Categorical(8).entropy(zeros)) == pytest.approx(3 * math.log(2), rel=1e-6)
    assert number(Categorical(8).log_prob(zeros, np.array([5]))) == pytest.approx(-3 * math.log(2), rel=1e-6)
    assert number(MultiCategorical((4, 2, 2)).entropy(zeros)) == pytest.approx(4 * math.log(2), rel=1e-6)
    assert number(Bernoulli(8).entropy(zeros)) == pytest.approx(8 * math.log(2), rel=1e-6)
    assert number(Bernoulli(8).log_prob(zeros, np.ones((1, 8), np.int32))) == pytest.approx(-8 * math.log(2), rel=1e-6)
    # The standard normal: entropy log(2 pi e) / 2 = 1.4189385, density at 0 is 0.3989423.
    assert number(DiagGaussian(4).entropy(zeros)) == pytest.approx(4 * 1.4189385, rel=1e-6)
    log_density = number(DiagGaussian(4).log_prob(zeros, np.zeros((1, 4), np.float32)))
    assert log_density == pytest.approx(4 * math.log(0.3989423), rel=1e-6)


@each_discrete
@each_seed
def test_mode_is_the_most_probable_action(twin, seed):
    for row in some_outputs(twin, seed, 3):
        best = twin.actions[int(np.argmax(probabilities(twin, row)))]
        np.testing.assert_array_equal(backend.to_numpy(twin.distribution.mode(row[None]))[0], best)


@each_gaussian
@each_seed
def test_no_action_is_denser_than_the_mode(twin, seed):
    outputs = some_outputs(twin, seed, 3)
    mode = backend.to_numpy(twin.distribution.mode(outputs))
    top = backend.to_numpy(twin.distribution.log_prob(outputs, mode))
    for k, side in itertools.product(range(twin.distribution.nb_actions), (-0.1, 0.1)):
        other = mode.copy()
        other[:, k] += side
        assert np.all(backend.to_numpy(twin.distribution.log_prob(outputs, other)) < top)


# ---- Samples ------------------------------------------------------------------------------------------------------


@each_discrete
@each_seed
def test_samples_are_as_frequent_as_probable(twin, seed):
    """The joint action is counted, so that components which depend on each other fail, too."""
    row = some_outputs(twin, seed, 1)[0]
    counts = np.bincount(index_of(twin, draw(twin, row, seed)), minlength=len(twin.actions))
    assert_counts_fit(counts, probabilities(twin, row))


@each_discrete
def test_a_sample_does_not_depend_on_the_row_before(twin):
    row = some_outputs(twin, 0, 1)[0]
    index, p = index_of(twin, draw(twin, row, 3)), probabilities(twin, row)
    pairs = np.bincount(index[::2] * len(p) + index[1::2], minlength=len(p) ** 2)
    assert_counts_fit(pairs, np.outer(p, p).ravel())


@each_gaussian
@each_seed
def test_moments_of_gaussian_samples(twin, seed):
    row = some_outputs(twin, seed, 1)[0]
    z = draw(twin, row, seed).astype(float)
    for k, (mean, std) in enumerate(twin.mean_std(row.tolist())):
        z[:, k] = (z[:, k] - mean) / std
    # Of n standard normal draws, each mean of a power is normal with these deviations times 1 / sqrt(n).
    for power, want, sigma in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert np.all(np.abs((z**power).mean(axis=0) - want) < 4 * sigma / math.sqrt(NB_DRAWS))
    for i, j in itertools.combinations(range(z.shape[1]), 2):
        assert abs((z[:, i] * z[:, j]).mean()) < 4 / math.sqrt(NB_DRAWS)
    assert np.all(np.abs((z[1:] * z[:-1]).mean(axis=0)) < 4 / math.sqrt(NB_DRAWS - 1))


@each
def test_one_generator_decides_every_sample(twin):
    outputs = np.zeros((50, twin.nb_outputs), np.float32)

    def two_samples(seed):
        rng = np.random.default_rng(seed)
        noises = [twin.distribution.noise(rng, 50) for _ in range(2)]
        return noises, [backend.to_numpy(twin.distribution.sample(outputs, noise)) for noise in noises]

    keras.utils.set_random_seed(1)  # of NumPy's and Keras' global generators, which have no part in it
    noises, samples = two_samples(7)
    keras.utils.set_random_seed(2)
    for first, again in zip((*noises, *samples), itertools.chain(*two_samples(7)), strict=True):
        np.testing.assert_array_equal(first, again)
    # Another seed, and the second draw of one generator, differ; so do samples, where there is a choice.
    assert not np.any(noises[0] == noises[1])
    assert not np.any(noises[0] == two_samples(8)[0][0])
    if twin.nb_outputs > 1:
        assert np.any(samples[0] != samples[1])
        assert np.any(samples[0] != two_samples(8)[1][0])


@each
def test_noise_is_float32_of_its_distribution(twin):
    assert twin.distribution.noise(np.random.default_rng(0), 3).shape == (3, twin.nb_noise)
    nb_rows = 20_000
    noise = twin.distribution.noise(np.random.default_rng(1), nb_rows)
    assert isinstance(noise, np.ndarray) and noise.dtype == np.float32
    assert noise.shape == (nb_rows, twin.nb_noise) and np.all(np.isfinite(noise))
    # Kolmogorov and Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand columns.
    steps = np.arange(nb_rows + 1) / nb_rows
    for column in noise.T:
        cdf = np.array([twin.noise_cdf(x) for x in np.sort(column).tolist()])
        assert max(np.max(steps[1:] - cdf), np.max(cdf - steps[:-1])) < 1.95 / math.sqrt(nb_rows)
    # Columns are uncorrelated with each other and with the row before.
    z = ((noise - noise.mean(axis=0)) / noise.std(axis=0)).astype(float)
    limit = 4.5 / math.sqrt(nb_rows)
    assert np.all(np.abs(z.T @ z / nb_rows - np.eye(twin.nb_noise)) < limit)
    assert np.all(np.abs(z[1:].T @ z[:-1] / nb_rows) < limit)


@pytest.mark.parametrize("seed", [2, 5, 10])  # with these a float32 exponential is 0 within the draws
@pytest.mark.parametrize("distribution", [Categorical(4), MultiCategorical((2, 2)), Bernoulli(4), DiagGaussian(4)])
def test_no_noise_is_rarer_than_its_draws_allow(distribution, seed):
    """4e6 draws stay within +-30: exp(-30) is 1e-13. Noise without an upper bound picks actions that are never due."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        noise = distribution.noise(rng, 250_000)
        assert np.all(np.abs(noise) < 30)


@pytest.mark.parametrize(
    ("distribution", "outputs", "never"),
    [
        (Categorical(3), [0.0, -20.0, 0.0], lambda a: a == 1),
        (MultiCategorical((2, 2)), [0.0, -20.0, 0.0, -20.0], lambda a: a == 1),
        (Bernoulli(2), [-20.0, -20.0], lambda a: a == 1),
    ],
    ids=["categorical", "multi", "bernoulli"],
)
@each_seed
def test_an_action_of_probability_2e_9_is_not_among_1e5(distribution, outputs, never, seed):
    noise = distribution.noise(np.random.default_rng(seed), NB_DRAWS)
    action = distribution.sample(np.repeat(np.array([outputs], np.float32), NB_DRAWS, axis=0), noise)
    assert not np.any(never(backend.to_numpy(action)))


# ---- Extreme outputs ----------------------------------------------------------------------------------------------


@each_discrete
def test_extreme_logits_give_finite_values_and_gradients(twin):
    extremes = list(itertools.product((-1e4, 0.0, 1e4), repeat=min(twin.nb_outputs, 3)))
    outputs = np.array([np.resize(x, twin.nb_outputs) for x in extremes], np.float32)
    noise = twin.distribution.noise(np.random.default_rng(0), len(outputs))
    entropy = loop(twin.entropy, outputs)
    for jit in (False, True):
        compiled = backend.compile_function(methods(twin.distribution), [], jit_compile=jit)
        for a in twin.actions:
            action = np.repeat(np.array([a], np.int32), len(outputs), axis=0)
            sample, mode, log_prob, got = compiled(outputs, noise, action)
            np.testing.assert_allclose(log_prob, loop(twin.log_prob, outputs, action), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(got, entropy, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(mode, loop(twin.mode, outputs))
            np.testing.assert_array_equal(sample, loop(twin.sample, outputs, noise))
    for a in twin.actions:
        action = np.repeat(np.array([a], np.int32), len(outputs), axis=0)
        slope = gradient(lambda o, action=action: twin.distribution.log_prob(o, action), outputs)
        # Of log softmax and log sigmoid alike: what happened minus its expectation, between -1 and 1.
        assert np.all(np.isfinite(slope)) and np.all(np.abs(slope) <= 1)
    slope = gradient(twin.distribution.entropy, outputs)
    assert np.all(np.isfinite(slope)) and np.all(np.abs(slope) < 1)


@each_gaussian
@pytest.mark.parametrize("mean", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("log_std", [-20.0, 2.0])
def test_gaussians_far_away_narrow_or_wide_give_finite_values_and_gradients(twin, mean, log_std):
    nb_actions = twin.distribution.nb_actions
    outputs = np.array([[mean] * nb_actions + [log_std] * nb_actions], np.float32)
    action = backend.to_numpy(twin.distribution.sample(outputs, twin.distribution.noise(np.random.default_rng(0), 1)))
    assert np.isfinite(backend.to_numpy(twin.distribution.log_prob(outputs, action))).all()
    assert backend.to_numpy(twin.distribution.entropy(outputs))[0] == pytest.approx(
        nb_actions * (log_std + 0.5 * math.log(2 * math.pi * math.e)), rel=1e-6
    )
    assert np.all(np.isfinite(gradient(lambda o: twin.distribution.log_prob(o, action), outputs)))
    np.testing.assert_array_equal(
        gradient(twin.distribution.entropy, outputs), [[0.0] * nb_actions + [1.0] * nb_actions]
    )


# ---- Which distribution for which space ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "kind", "nb_actions", "nb_outputs"),
    [
        (spaces.Discrete(1), Categorical, 1, 1),
        (spaces.Discrete(3), Categorical, 1, 3),
        (spaces.Discrete(5, start=-2), Categorical, 1, 5),
        (spaces.MultiDiscrete([4]), MultiCategorical, 1, 4),
        (spaces.MultiDiscrete([2, 3, 4]), MultiCategorical, 3, 9),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical, 4, 14),
        (spaces.MultiBinary(1), Bernoulli, 1, 1),
        (spaces.MultiBinary(5), Bernoulli, 5, 5),
        (spaces.MultiBinary((2, 3)), Bernoulli, 6, 6),
        (spaces.Box(-1, 1, (4,), np.float32), DiagGaussian, 4, 8),
        (spaces.Box(-1, 1, (2, 3), np.float64), DiagGaussian, 6, 12),
        (spaces.Box(-1, 1, (), np.float32), DiagGaussian, 1, 2),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), DiagGaussian, 2, 4),
    ],
    ids=str,
)
def test_distribution_for_a_space(space, kind, nb_actions, nb_outputs):
    distribution = distribution_for(space)
    assert type(distribution) is kind and isinstance(distribution, Distribution)
    assert (distribution.nb_actions, distribution.nb_outputs) == (nb_actions, nb_outputs)

    # A thousand samples are actions of the space, up to its start, shape and bounds; every choice is met.
    outputs = np.zeros((1000, nb_outputs), np.float32)
    sample = backend.to_numpy(distribution.sample(outputs, distribution.noise(np.random.default_rng(0), 1000)))
    actions = sample.reshape(1000, *space.shape).astype(space.dtype)
    if isinstance(space, spaces.Box):
        actions = np.clip(actions, space.low, space.high)
        assert len(np.unique(sample)) > 900 * nb_actions
    else:
        sizes = {
            spaces.Discrete: lambda: [space.n],
            spaces.MultiDiscrete: lambda: space.nvec.ravel().tolist(),
            spaces.MultiBinary: lambda: [2] * nb_actions,
        }[type(space)]()
        for column, size in zip(sample.reshape(1000, -1).T, sizes, strict=True):
            assert set(column.tolist()) == set(range(size))
    for action in actions:
        assert space.contains(action + space.start if isinstance(space, spaces.Discrete) else np.asarray(action))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
        spaces.Text(3),
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Box(-3, 3, (2,), np.int64),
        None,
        4,
    ],
    ids=str,
)
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(ValueError, match="must be one env's Discrete, MultiDiscrete, MultiBinary or Box") as error:
        distribution_for(space)
    assert repr(space) in str(error.value)
    assert "env.action_space" in str(error.value)


# ---- What it is all for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_actions", [2, 3, 8])
@each_seed
def test_gradient_of_a_softmax_bandit(nb_actions, seed):
    """dJ / dl_i = p_i (r_i - J) with J = sum_a p_a r_a, directly and as E[r grad log p]; ascent finds the best arm."""
    distribution = Categorical(nb_actions)
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, nb_actions)).astype(np.float32)
    rewards = rng.permutation(np.linspace(-1, 2, nb_actions)).astype(np.float32)
    arms = np.arange(nb_actions)

    def log_probs(outputs):
        return distribution.log_prob(ops.repeat(outputs, nb_actions, axis=0), arms)

    def value(outputs):
        return ops.sum(ops.exp(log_probs(outputs)) * rewards)

    p = np.array(softmax_twin(logits[0].tolist()))
    want = p * (rewards - (p * rewards).sum())
    np.testing.assert_allclose(gradient(value, logits)[0], want, rtol=1e-4, atol=1e-6)
    weights = (p * rewards).astype(np.float32)
    np.testing.assert_allclose(
        gradient(lambda o: ops.sum(weights * log_probs(o)), logits)[0], want, rtol=1e-4, atol=1e-6
    )
    # A baseline changes nothing: E[grad log p] = 0.
    np.testing.assert_allclose(gradient(lambda o: ops.sum(p.astype(np.float32) * log_probs(o)), logits), 0, atol=1e-6)

    policy = keras.Variable(np.zeros_like(logits))  # where the best arm is rare at first, the ascent takes for ever
    optimizer = keras.optimizers.SGD(2.0)
    optimizer.build([policy])
    ascend = backend.compile_function(
        lambda: backend.minimize(lambda: (-value(policy), None), [policy], optimizer)[0],
        [policy, *optimizer.variables],
    )
    values = [-float(ascend()) for _ in range(300)]
    assert np.all(np.diff(values) > -1e-5) and values[-1] > 1.95
    assert backend.to_numpy(distribution.mode(np.array(policy)))[0] == np.argmax(rewards)


# ---- Squashed Gaussian ---------------------------------------------------------------------------------------------

SQUASHED = [(0.0, 1.0), (1.5, 0.3), (-0.2, 0.05)]  # mean and standard deviation of u
each_squashed = pytest.mark.parametrize(("mean", "std"), SQUASHED)


def squashed_twin(mean, std, action):
    """The density of tanh(u) by change of variables, in float64."""
    z = (math.atanh(action) - mean) / std
    return math.exp(-0.5 * z * z) / (std * math.sqrt(2 * math.pi)) / (1 - action**2)


def outputs_of(mean, std, nb_rows=1):
    return np.tile(np.float32([[mean, math.log(std)]]), (nb_rows, 1))


@each_squashed
def test_squashed_density_integrates_to_one_and_gives_the_entropy(mean, std):
    u = np.linspace(mean - 9 * std, mean + 9 * std, 20_001)
    d, outputs = SquashedGaussian(1), outputs_of(mean, std, len(u))
    log_p = np.float64(ops.convert_to_numpy(d.log_prob_of(outputs, np.float32(u)[:, None])))
    shares = np.exp(log_p) * (1 - np.tanh(u) ** 2) * (u[1] - u[0])  # da = (1 - tanh^2) du
    assert np.sum(shares) == pytest.approx(1, abs=1e-6)
    entropy = ops.convert_to_numpy(d.entropy(outputs[:1]))
    np.testing.assert_allclose(entropy, [-np.sum(shares * log_p)], atol=2e-5)


@pytest.mark.parametrize(("mean", "std"), [(0.0, math.exp(2)), (0.7, 3.0)])
def test_entropy_of_wide_squashed_gaussians(mean, std):
    u = np.linspace(mean - 9 * std, mean + 9 * std, 200_001)
    p = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi)) * (u[1] - u[0])
    slope = 2 * (math.log(2) - u - np.logaddexp(0, -2 * u))
    expected = 0.5 * math.log(2 * math.pi * math.e) + math.log(std) + np.sum(p * slope)
    entropy = ops.convert_to_numpy(SquashedGaussian(1).entropy(outputs_of(mean, std)))
    np.testing.assert_allclose(entropy, [expected], atol=0.03)


@each_squashed
def test_squashed_log_prob_equals_the_change_of_variables_by_finite_differences(mean, std):
    u = mean + std * np.linspace(-2, 2, 41)
    step = 1e-6
    slope = (np.tanh(u + step) - np.tanh(u - step)) / (2 * step)
    expected = -0.5 * ((u - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi)) - np.log(slope)
    d, outputs = SquashedGaussian(1), outputs_of(mean, std, len(u))
    np.testing.assert_allclose(d.log_prob_of(outputs, np.float32(u)[:, None]), expected, atol=2e-4)
    np.testing.assert_allclose(d.log_prob(outputs, np.float32(np.tanh(u))[:, None]), expected, atol=2e-3)
    twin = [math.log(squashed_twin(mean, std, a)) for a in np.tanh(u)]
    np.testing.assert_allclose(twin, expected, atol=1e-6)


@each_seed
@pytest.mark.parametrize("nb_actions", [1, 2, 3])
def test_a_squashed_sample_and_its_log_prob_equal_loops(nb_actions, seed):
    rng = np.random.default_rng(seed)
    d = SquashedGaussian(nb_actions)
    outputs = rng.uniform(-1, 0.5, (ROWS[seed], 2 * nb_actions)).astype("f4")
    noise = d.noise(rng, len(outputs))
    action, log_prob = (ops.convert_to_numpy(x) for x in d.sample_and_log_prob(outputs, noise))
    for i, row in enumerate(outputs.astype("f8")):
        mean, std = row[:nb_actions], np.exp(row[nb_actions:])
        expected = np.tanh(mean + std * noise[i])
        np.testing.assert_allclose(action[i], expected, rtol=1e-5, atol=1e-6)
        logs = [math.log(squashed_twin(*x)) for x in zip(mean, std, expected, strict=True)]
        assert log_prob[i] == pytest.approx(sum(logs), rel=1e-4, abs=1e-5)
    np.testing.assert_array_equal(action, ops.convert_to_numpy(d.sample(outputs, noise)))
    np.testing.assert_allclose(d.mode(outputs), np.tanh(outputs[:, :nb_actions]), rtol=1e-5)


def test_squashed_log_prob_is_finite_where_tanh_rounds_to_one():
    d = SquashedGaussian(2)
    for u in (20.0, -20.0, 200.0):
        outputs = np.float32([[u, -u, -1.0, 0.5]])
        (action, log_prob), both = d.sample_and_log_prob(outputs, np.zeros((1, 2), "f4")), np.float32([[u, -u]])
        assert np.all(np.abs(ops.convert_to_numpy(action)) == 1)
        expected = -math.log(2 * math.pi) + 0.5 + 2 * 2 * (abs(u) - math.log(2))
        np.testing.assert_allclose(log_prob, [expected], rtol=1e-5)
        np.testing.assert_allclose(d.log_prob_of(outputs, both), [expected], rtol=1e-5)
        assert np.isfinite(ops.convert_to_numpy(d.log_prob(outputs, action))).all()
        assert np.isfinite(ops.convert_to_numpy(d.entropy(outputs))).all()
        for part in (0, 1):
            gradient = value_and_gradient(lambda o: d.sample_and_log_prob(o, np.zeros((1, 2), "f4"))[part], outputs)[1]  # noqa: B023
            assert np.isfinite(gradient).all()


def test_squashed_log_std_is_bounded():
    d = SquashedGaussian(1)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(d.bounded(np.float32([[30, 5], [-30, -50]]))), [[30, 2], [-30, -20]]
    )
    noise = np.ones((2, 1), "f4")
    wide, bound = np.float32([[0.1, 9.0], [0.1, -99.0]]), np.float32([[0.1, 2.0], [0.1, -20.0]])
    for got, expected in zip(d.sample_and_log_prob(wide, noise), d.sample_and_log_prob(bound, noise), strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(got), ops.convert_to_numpy(expected))


@pytest.mark.parametrize("nb_actions", [1, 3])
def test_gradients_of_a_squashed_sample_equal_finite_differences_with_common_noise(nb_actions):
    rng = np.random.default_rng(3)
    d = SquashedGaussian(nb_actions)
    outputs = rng.uniform(-1, 0.5, (1, 2 * nb_actions))
    noise = rng.standard_normal((500, nb_actions)).astype("f4")
    direction = rng.standard_normal(nb_actions)

    def objective(row):
        """The mean of alpha log pi(a) - f(a), as SAC's actor has it."""
        action, log_prob = d.sample_and_log_prob(ops.tile(row, (500, 1)), noise)
        value = ops.sum(ops.sin(2 * action) * ops.convert_to_tensor(direction.astype("f4")), axis=-1)
        return ops.mean(0.3 * log_prob - value)

    def twin(row):
        mean, log_std = row[0, :nb_actions], row[0, nb_actions:]
        u = mean + np.exp(log_std) * np.float64(noise)
        slope = 2 * (math.log(2) - u - np.logaddexp(0, -2 * u))
        log_prob = np.sum(-0.5 * np.float64(noise) ** 2 - log_std - 0.5 * math.log(2 * math.pi) - slope, axis=-1)
        return np.mean(0.3 * log_prob - np.sin(2 * np.tanh(u)) @ direction)

    value, gradient = value_and_gradient(objective, outputs)
    assert value == pytest.approx(twin(outputs), rel=1e-4)
    steps = 1e-5 * np.eye(2 * nb_actions)
    expected = [(twin(outputs + s) - twin(outputs - s)) / 2e-5 for s in steps]
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-3, atol=1e-4)
