import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from rl.policy import (
    BoltzmannGumbelQPolicy,
    BoltzmannQPolicy,
    EpsGreedyQPolicy,
    GreedyQPolicy,
    LinearAnnealedPolicy,
    MaxBoltzmannQPolicy,
    Policy,
    SoftmaxPolicy,
)


def annealed_eps():
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.05, 1000)
    policy._set_agent(SimpleNamespace(step=400, training=True))
    return policy


Q_POLICIES = [
    lambda: EpsGreedyQPolicy(0.5),
    GreedyQPolicy,
    BoltzmannQPolicy,
    lambda: MaxBoltzmannQPolicy(0.5),
    BoltzmannGumbelQPolicy,
    annealed_eps,
]


def chi_square(counts, probabilities):
    expected = counts.sum() * np.asarray(probabilities)
    return float(((counts - expected) ** 2 / expected).sum())


def frequencies(policy, row, nb_draws=20000):
    policy.rng = 3
    actions = policy.select_actions(np.tile(row, (nb_draws, 1)))
    return np.bincount(actions, minlength=len(row))


def softmax(row):
    weights = np.exp(np.asarray(row, float))
    return weights / weights.sum()


# ---- one lane and many ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", Q_POLICIES)
def test_one_row_gives_an_int_and_n_rows_give_n(make):
    policy = make()
    rng = np.random.default_rng(0)
    for nb_actions in (1, 2, 5):
        policy = make()
        for _ in range(2):
            action = policy.select_action(q_values=rng.normal(size=nb_actions).astype("float32"))
            assert isinstance(action, int) and 0 <= action < nb_actions
            for nb_lanes in (1, 3, 8):
                actions = policy.select_actions(rng.normal(size=(nb_lanes, nb_actions)))
                assert actions.dtype == np.int64 and actions.shape == (nb_lanes,)
                assert 0 <= actions.min() and actions.max() < nb_actions


@pytest.mark.parametrize("make", Q_POLICIES)
def test_nan_and_infinite_q_values_are_refused_by_name(make):
    policy = make()
    with pytest.raises(ValueError, match=r"lane\(s\) \[1\].*nan"):
        policy.select_actions(np.array([[0.0, 1.0], [np.nan, 1.0], [2.0, 3.0]]))
    for bad in ([1.0, np.inf], [-np.inf, -np.inf], [np.nan, np.nan]):
        with pytest.raises(ValueError, match="diverged"):
            policy.select_action(q_values=np.array(bad))
    with pytest.raises(ValueError, match=r"\(1, 2, 2\)"):
        policy.select_action(q_values=np.zeros((1, 2, 2)))
    with pytest.raises(ValueError, match=r"\(N, nb_actions\)"):
        policy.select_actions(np.zeros(3))


@pytest.mark.parametrize("make", Q_POLICIES)
def test_an_action_of_minus_infinity_is_never_the_greedy_one(make):
    policy = make()
    for attr in ("eps", "C"):
        if hasattr(policy, attr):
            setattr(policy, attr, 0.0)
    if isinstance(policy, LinearAnnealedPolicy):
        policy.value_max = policy.value_min = 0.0
    assert set(policy.select_actions(np.tile([-np.inf, 0.0, -np.inf], (50, 1)))) == {1}


# ---- user policies -------------------------------------------------------------------------------


class OneRow(Policy):
    """As users write them: no super().__init__(), one row only."""

    def __init__(self):
        self.seen = []

    def select_action(self, q_values):
        assert q_values.ndim == 1
        self.seen.append(q_values.tolist())
        return np.argmin(q_values)


def test_user_policies_are_called_row_by_row():
    policy = OneRow()
    for _ in range(2):
        actions = policy.select_actions(np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 2.0]]))
        np.testing.assert_array_equal(actions, [1, 0, 1])
        assert actions.dtype == np.int64
    assert policy.seen[:3] == [[1.0, 0.0], [0.0, 1.0], [3.0, 2.0]] and len(policy.seen) == 6
    assert isinstance(policy.rng.random(), float)  # works although super().__init__() was never called


def test_only_the_class_that_defines_select_action_can_call_itself_vectorized():
    calls = []

    class Vectorized(OneRow):
        vectorized = True

        def select_action(self, q_values):
            calls.append(q_values.shape)
            return q_values.argmin(axis=-1)

    class OverridesOneRow(Vectorized):
        def select_action(self, q_values):
            assert q_values.ndim == 1
            return super().select_action(q_values)

    class Inherits(Vectorized):
        pass

    class OfBuiltIn(EpsGreedyQPolicy):
        def select_action(self, q_values):
            assert q_values.ndim == 1
            calls.append(q_values.shape)
            return super().select_action(q_values=q_values)

    q_values = np.array([[1.0, 0.0], [0.0, 1.0]])
    for cls, shapes in [(Vectorized, [(2, 2)]), (OverridesOneRow, [(2,)] * 2), (Inherits, [(2, 2)])]:
        calls.clear()
        np.testing.assert_array_equal(cls().select_actions(q_values), [1, 0])
        assert calls == shapes
    calls.clear()
    np.testing.assert_array_equal(OfBuiltIn(eps=0.0).select_actions(q_values), [0, 1])
    assert calls == [(2,)] * 2
    policy = GreedyQPolicy()
    policy.select_action = lambda q_values: int(q_values.ndim == 1)  # patched onto one object
    np.testing.assert_array_equal(policy.select_actions(q_values), [1, 1])


@pytest.mark.parametrize("answer", [2, -1, 0.5, None, [0, 1]])
def test_bad_answers_of_user_policies_are_refused(answer):
    class Bad(Policy):
        def select_action(self, q_values):
            return answer

    with pytest.raises(ValueError, match="Bad.select_action must return"):
        Bad().select_actions(np.zeros((3, 2)))


def test_the_base_class_says_what_to_override():
    with pytest.raises(NotImplementedError, match="select_action"):
        Policy().select_actions(np.zeros((1, 2)))
    assert Policy().metrics == [] and Policy().metrics_names == [] and Policy().get_config() == {}


# ---- distributions -------------------------------------------------------------------------------

ROW = [0.2, 1.5, -1.0, 1.0]


def test_greedy_takes_the_first_of_the_best():
    actions = GreedyQPolicy().select_actions(np.array([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0], [-3.0, -2.0, -1.0]]))
    np.testing.assert_array_equal(actions, [1, 0, 2])


@pytest.mark.parametrize("eps", [0.1, 0.5, 1.0])
def test_eps_greedy_frequencies(eps):
    probabilities = np.full(4, eps / 4)
    probabilities[1] += 1 - eps
    assert chi_square(frequencies(EpsGreedyQPolicy(eps), ROW), probabilities) < 16.3  # df 3, p = 0.001


def test_eps_greedy_lanes_toss_their_own_coins():
    policy = EpsGreedyQPolicy(0.5)
    policy.rng = 0
    q_values = np.tile(np.arange(100.0), (2, 1))  # a random action is almost never the best one
    explored = np.array([policy.select_actions(q_values) != 99 for _ in range(4000)])
    assert abs(np.corrcoef(explored.T)[0, 1]) < 0.06
    assert abs(explored.mean() - 0.5 * 0.99) < 0.03


def test_eps_can_be_changed_later():
    policy = EpsGreedyQPolicy(1.0)
    policy.eps = 0.0
    assert set(policy.select_actions(np.tile(ROW, (200, 1)))) == {1}


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_boltzmann_is_the_softmax(tau):
    policy = BoltzmannQPolicy(tau)
    expected = softmax(np.array(ROW) / tau)
    np.testing.assert_allclose(policy.probabilities(ROW), expected, rtol=1e-12)
    np.testing.assert_allclose(policy.probabilities([ROW, ROW[::-1]]), [expected, expected[::-1]], rtol=1e-12)
    assert chi_square(frequencies(policy, ROW), expected) < 16.3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_boltzmann_is_safe_for_huge_values(dtype):
    policy = BoltzmannQPolicy()
    for row, best in ([1e8, -1e8, 0.0], 0), ([-1e8, -1e8 + 1000, -2e8], 1), ([1e8, 1e8 - 1000, 1e8 - 2000], 0):
        probabilities = policy.probabilities(np.array(row, dtype))
        assert probabilities.sum() == pytest.approx(1.0) and probabilities[best] > 0.999
        assert set(policy.select_actions(np.tile(np.array(row, dtype), (100, 1)))) == {best}
    np.testing.assert_allclose(policy.probabilities(np.array([1e8, 1e8], dtype)), [0.5, 0.5])
    tiny = BoltzmannQPolicy(tau=1e-300)
    np.testing.assert_allclose(tiny.probabilities(np.array([1e8, 0.0], dtype)), [1.0, 0.0])


def test_boltzmann_clip_bounds_the_range():
    policy = BoltzmannQPolicy(clip=(-1.0, 1.0))
    np.testing.assert_allclose(policy.probabilities([10.0, -10.0]), softmax([1.0, -1.0]))
    np.testing.assert_allclose(policy.probabilities([0.5, -0.5]), softmax([0.5, -0.5]))  # within: as without
    np.testing.assert_allclose(policy.probabilities([700.5, 699.5]), softmax([0.5, -0.5]))


def test_max_boltzmann_mixes_greedy_and_boltzmann():
    probabilities = 0.4 * softmax(np.array(ROW) / 2)
    probabilities[1] += 0.6
    assert chi_square(frequencies(MaxBoltzmannQPolicy(eps=0.4, tau=2.0), ROW), probabilities) < 16.3


@pytest.mark.parametrize("probs", [[0.1, 0.6, 0.3], [0.0, 0.0, 1.0], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
def test_softmax_policy_draws_from_the_probabilities(probs):
    policy = SoftmaxPolicy()
    counts = frequencies(policy, probs)
    positive = np.array(probs) > 0
    assert counts[~positive].sum() == 0
    assert chi_square(counts[positive], np.array(probs)[positive]) < 13.9  # df at most 2
    for _ in range(2):
        action = policy.select_action(nb_actions=3, probs=np.array(probs))
        assert isinstance(action, int) and positive[action]
    half = np.array(softmax(np.linspace(-1, 1, 50)), np.float16)
    assert policy.select_actions(half[None]).shape == (1,)


def test_softmax_policy_refuses_what_are_no_probabilities():
    policy = SoftmaxPolicy()
    for bad in ([0.5, 0.6], [-0.5, 1.5], [np.nan, 1.0], [3.0, 40.0]):
        with pytest.raises(ValueError, match="BoltzmannQPolicy for Q-values"):
            policy.select_action(nb_actions=2, probs=np.array(bad))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        policy.select_action(nb_actions=3, probs=np.array([0.5, 0.5]))


def test_boltzmann_gumbel_is_softmax_at_first_and_greedy_in_the_end():
    policy = BoltzmannGumbelQPolicy(C=2.0)
    # All counts are 1 in the first call, whatever the number of lanes: Gumbel noise of scale C is a softmax.
    assert chi_square(frequencies(policy, ROW), softmax(np.array(ROW) / 2)) < 16.3
    policy.action_counts = np.full(4, 10**8)
    assert set(policy.select_actions(np.tile(ROW, (100, 1)))) == {1}


def test_boltzmann_gumbel_counts_training_only():
    policy = BoltzmannGumbelQPolicy()
    agent = SimpleNamespace(step=0, training=True)
    policy._set_agent(agent)
    counts = np.ones(3, int)
    for nb_lanes in (1, 4, 8):
        actions = policy.select_actions(np.zeros((nb_lanes, 3)))
        counts += np.bincount(actions, minlength=3)
        np.testing.assert_array_equal(policy.action_counts, counts)
    counts[policy.select_action(q_values=np.zeros(3))] += 1
    agent.training = False
    policy.select_actions(np.zeros((5, 3)))
    np.testing.assert_array_equal(policy.action_counts, counts)
    policy._set_agent(agent)  # the same one, as before every fit
    agent.training = True
    counts += np.bincount(policy.select_actions(np.zeros((2, 3))), minlength=3)
    np.testing.assert_array_equal(policy.action_counts, counts)
    with pytest.raises(ValueError, match="one policy per agent"):
        policy.select_actions(np.zeros((2, 4)))
    policy._set_agent(SimpleNamespace(step=0, training=True))
    assert policy.action_counts is None


def test_boltzmann_gumbel_state_goes_through_json():
    policy, other = BoltzmannGumbelQPolicy(), BoltzmannGumbelQPolicy()
    fresh = policy.get_state()
    policy.select_actions(np.zeros((9, 3)))
    other.set_state(json.loads(json.dumps(policy.get_state())))
    for _ in range(3):
        np.testing.assert_array_equal(policy.select_actions(np.zeros((4, 3))), other.select_actions(np.zeros((4, 3))))
    np.testing.assert_array_equal(policy.action_counts, other.action_counts)
    other.set_state(fresh)
    assert other.action_counts is None


# ---- annealing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.1), (0.4, 1.0), (0.3, 0.3)])
def test_annealing_follows_the_agents_step_in_both_directions(start, end):
    policy = LinearAnnealedPolicy(
        EpsGreedyQPolicy(), "eps", value_max=start, value_min=end, value_test=0.05, nb_steps=1e3
    )
    agent = SimpleNamespace(step=0, training=True)
    policy._set_agent(agent)
    for step, part in [(0, 0.0), (1, 0.001), (250, 0.25), (500, 0.5), (1000, 1.0), (1008, 1.0), (10**6, 1.0)]:
        agent.step = step
        for nb_lanes in (1, 8):  # steps count over lanes: the value depends on the step only
            policy.select_actions(np.zeros((nb_lanes, 2)))
            assert policy.inner_policy.eps == pytest.approx(start + part * (end - start), abs=1e-12)
            assert policy.get_current_value() == policy.inner_policy.eps
    agent.training = False
    policy.select_action(q_values=np.zeros(2))
    assert policy.inner_policy.eps == 0.05
    agent.training = True
    policy.select_action(q_values=np.zeros(2))
    assert policy.inner_policy.eps == end


def test_annealing_works_on_user_policies_row_by_row():
    class Mine(OneRow):
        tau = 3.0

    policy = LinearAnnealedPolicy(Mine(), "tau", 3.0, 1.0, 0.0, 100)
    policy._set_agent(SimpleNamespace(step=50, training=True))
    np.testing.assert_array_equal(policy.select_actions(np.array([[1.0, 0.0], [0.0, 1.0]])), [1, 0])
    assert policy.inner_policy.tau == 2.0 and len(policy.inner_policy.seen) == 2

    class Sub(LinearAnnealedPolicy):
        def select_action(self, q_values):
            assert q_values.ndim == 1
            return super().select_action(q_values=q_values)

    sub = Sub(Mine(), "tau", 3.0, 1.0, 0.0, 100)
    sub._set_agent(SimpleNamespace(step=0, training=True))
    np.testing.assert_array_equal(sub.select_actions(np.array([[1.0, 0.0], [0.0, 1.0]])), [1, 0])


def test_annealing_reports_its_value_and_passes_the_agent_on():
    policy = annealed_eps()
    policy.select_actions(np.zeros((2, 2)))
    assert policy.metrics_names == ["mean_eps"] and policy.metrics == [pytest.approx(0.64)]
    gumbel = LinearAnnealedPolicy(BoltzmannGumbelQPolicy(), "C", 1.0, 0.1, 0.1, 10)
    gumbel._set_agent(policy.agent)
    assert gumbel.inner_policy.agent is policy.agent


def test_annealing_a_policy_over_probabilities():
    class Sharpened(SoftmaxPolicy):
        power = 1.0

    policy = LinearAnnealedPolicy(Sharpened(), "power", 1.0, 0.0, 0.0, 10)
    policy._set_agent(SimpleNamespace(step=5, training=True))
    assert policy.select_action(nb_actions=2, probs=np.array([0.0, 1.0])) == 1
    np.testing.assert_array_equal(policy.select_actions(np.array([[0.0, 1.0], [1.0, 0.0]])), [1, 0])
    assert policy.inner_policy.power == 0.5


def test_annealing_refuses_nonsense():
    with pytest.raises(ValueError, match="no attribute 'epsilon'"):
        LinearAnnealedPolicy(EpsGreedyQPolicy(), "epsilon", 1.0, 0.1, 0.05, 100)
    with pytest.raises(ValueError, match="nb_steps"):
        LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.05, 0)
    with pytest.raises(RuntimeError, match="agent"):
        LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.05, 100).select_action(q_values=np.zeros(2))


# ---- configs and random streams ------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        EpsGreedyQPolicy(0.3),
        GreedyQPolicy(),
        BoltzmannQPolicy(2.0, clip=(-3.0, 3.0)),
        MaxBoltzmannQPolicy(0.2, 3.0, (-1.0, 1.0)),
        BoltzmannGumbelQPolicy(0.7),
        SoftmaxPolicy(),
        LinearAnnealedPolicy(MaxBoltzmannQPolicy(0.2), "tau", 2.0, 1.0, 0.5, 100),
        LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 0.1, 1.0, 0.05, 5e4),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_config_round_trip(policy):
    serialised = json.loads(json.dumps(keras.saving.serialize_keras_object(policy)))
    assert serialised["registered_name"] == f"rl>{type(policy).__name__}"
    for copy in (
        keras.saving.deserialize_keras_object(serialised),
        type(policy).from_config(policy.get_config()),
    ):
        assert type(copy) is type(policy) and copy.get_config() == policy.get_config()
        assert getattr(copy, "clip", None) == getattr(policy, "clip", None)


@pytest.mark.parametrize("make", Q_POLICIES)
def test_draws_follow_numpys_seed_and_a_snapshot_puts_them_back(make):
    q_values = np.random.default_rng(0).normal(size=(6, 4))
    runs = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        policy = make()
        runs.append([policy.select_actions(q_values).tolist() for _ in range(20)])
    assert runs[0] == runs[1]
    if make is not GreedyQPolicy:
        assert runs[0] != runs[2]
    policy = make()
    state = policy.get_random_state()
    first = policy.select_actions(q_values)
    if isinstance(policy, BoltzmannGumbelQPolicy):
        policy.action_counts = None
    policy.set_random_state(state)
    np.testing.assert_array_equal(policy.select_actions(q_values), first)


def test_an_annealed_policy_has_the_stream_and_state_of_its_inner_policy():
    policy = annealed_eps()
    assert policy.rng is policy.inner_policy.rng
    policy.rng = 3
    assert policy.inner_policy.rng.random() == np.random.default_rng(3).random()
    inner = BoltzmannGumbelQPolicy()
    inner.select_actions(np.zeros((3, 2)))
    outer = LinearAnnealedPolicy(inner, "C", 1.0, 0.1, 0.1, 10)
    copy = LinearAnnealedPolicy(BoltzmannGumbelQPolicy(), "C", 1.0, 0.1, 0.1, 10)
    copy.set_state(outer.get_state())
    np.testing.assert_array_equal(copy.inner_policy.action_counts, inner.action_counts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EpsGreedyQPolicy(1.5),
        lambda: EpsGreedyQPolicy(np.nan),
        lambda: MaxBoltzmannQPolicy(-0.1),
        lambda: BoltzmannQPolicy(0.0),
        lambda: BoltzmannQPolicy(clip=(1.0, -1.0)),
        lambda: BoltzmannGumbelQPolicy(-1.0),
    ],
)
def test_bad_arguments_are_refused_at_construction(make):
    with pytest.raises(ValueError, match="got"):
        make()


# ---- probabilities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [GreedyQPolicy(), EpsGreedyQPolicy(0.3), BoltzmannQPolicy(0.7), MaxBoltzmannQPolicy(0.4, tau=0.5)],
    ids=lambda p: type(p).__name__,
)
def test_probabilities_are_the_frequencies_of_the_choices(policy):
    rows = np.array([ROW, ROW[::-1], np.zeros(len(ROW))])
    told = policy.probabilities(rows)
    assert told.shape == rows.shape
    np.testing.assert_allclose(told.sum(axis=-1), 1.0, rtol=1e-12)
    for row, probabilities in zip(rows, told, strict=True):
        np.testing.assert_allclose(policy.probabilities(row), probabilities)
        policy.rng = 5
        counts = np.bincount(policy.select_actions(np.tile(row, (20_000, 1))), minlength=len(row))
        spread = np.sqrt(20_000 * probabilities * (1 - probabilities))
        assert (np.abs(counts - 20_000 * probabilities) <= 4 * spread).all()


def test_probabilities_of_an_annealed_policy_follow_the_step_and_one_that_has_none_says_so():
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.0, 0.1, nb_steps=100)
    policy._set_agent(SimpleNamespace(step=50, training=True))
    np.testing.assert_allclose(policy.probabilities([0.0, 1.0]), [0.25, 0.75])
    with pytest.raises(ValueError, match="BoltzmannGumbelQPolicy cannot tell the probabilities of its actions"):
        BoltzmannGumbelQPolicy().probabilities(ROW)
