"""`NAFLayer` and the model of three networks: a parabola with one maximum, against a naive twin."""

import keras
import numpy as np
import pytest
from keras import ops

from rl.agents.quadratic import NAFLayer
from tests.agents.test_naf import MODES, make_agent, naive_advantage, naive_lower, nb_entries, numpy
from tests.backends import value_and_gradient

# ---- the layer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nb_actions", [1, 2, 3, 4])
def test_the_layer_equals_a_naive_twin(nb_actions, mode):
    rng = np.random.default_rng(nb_actions)
    flat = rng.normal(size=(7, nb_entries(nb_actions, mode))).astype("f4")
    mu, action = rng.normal(size=(2, 7, nb_actions)).astype("f4")
    expected = [[naive_advantage(*row, mode)] for row in zip(flat, mu, action, strict=True)]
    np.testing.assert_allclose(NAFLayer(nb_actions, mode=mode)([flat, mu, action]), expected, rtol=2e-5)
    lower = [naive_lower(row, nb_actions, mode) for row in flat]
    np.testing.assert_allclose(NAFLayer(nb_actions, mode).cholesky(flat), lower, rtol=1e-5, atol=1e-6)


def test_the_layer_is_filled_row_by_row():
    lower = NAFLayer(3).cholesky(np.array([[0, 1, 0, 2, 3, 0]], "f4"))[0]
    np.testing.assert_allclose(lower, [[1, 0, 0], [1, 1, 0], [2, 3, 1]], rtol=1e-6)
    lower = NAFLayer(3, "diag").cholesky(np.log(np.array([[2, 3, 4]], "f4")))[0]
    np.testing.assert_allclose(lower, np.diag([2, 3, 4]), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_layer_in_a_functional_model_comes_back_from_a_file(mode, tmp_path):
    inputs = [keras.Input((n,)) for n in (nb_entries(2, mode), 2, 2)]
    model = keras.Model(inputs, NAFLayer(2, mode=mode)(inputs))
    assert model.output_shape == (None, 1)
    model.save(tmp_path / "layer.keras")
    loaded = keras.saving.load_model(tmp_path / "layer.keras")
    given = [np.random.default_rng(0).normal(size=(5, x.shape[1])).astype("f4") for x in inputs]
    np.testing.assert_array_equal(loaded(given), model(given))
    assert loaded.layers[-1].mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_any_size_give_a_finite_positive_curvature(mode):
    layer = NAFLayer(2, mode)

    def advantage(flat):
        one = ops.ones((ops.shape(flat)[0], 2))
        return layer([flat, 0 * one, one])

    for size in (-1e6, -200.0, 9.9, 10.1, 200.0, 1e6):
        flat = np.full((1, nb_entries(2, mode)), size, "f4")
        value, gradient = value_and_gradient(advantage, flat)
        assert np.isfinite(value).all() and np.isfinite(gradient).all(), size
        assert (np.diagonal(numpy(layer.precision(flat))[0]) > 0).all(), size
    steps = np.linspace(9.999, 10.001, 3, dtype="f4")[:, None]  # no jump in value or slope where exp goes over
    value, slope = value_and_gradient(lambda x: NAFLayer(1).cholesky(x), steps)
    np.testing.assert_allclose(value[:, 0, 0], np.exp(steps[:, 0]), rtol=1e-5)
    np.testing.assert_allclose(slope[:, 0], np.exp(steps[:, 0]), rtol=2e-3)


def test_a_layer_is_told_what_it_cannot_take():
    with pytest.raises(ValueError, match="'full' or 'diag', got 'triangular'"):
        NAFLayer(2, mode="triangular")
    for mode, sizes in (("full", (2, 2, 2)), ("diag", (3, 2, 2)), ("full", (3, 1, 2)), ("full", (3, 2, 1))):
        with pytest.raises(ValueError, match=rf"NAFLayer\(2.*\(None, 2\).*got .*{sizes[0]}"):
            NAFLayer(2, mode)([np.zeros((4, n), "f4") for n in sizes])


# ---- Q -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nb_actions", [1, 2, 3, 4])
def test_q_has_its_one_maximum_at_mu_and_curvature_p(nb_actions, mode):
    agent = make_agent(nb_actions, mode, optimizer=None)
    states = np.random.default_rng(1).normal(size=(6, 1, 3)).astype("f4")
    mu, value = agent.model.mu(states), agent.model.V_model(states)[:, 0]
    q, v = agent.model.q_and_value(states, mu)
    np.testing.assert_allclose(q, value, rtol=1e-6)
    np.testing.assert_allclose(v, value, rtol=1e-6)
    _, slope = value_and_gradient(lambda a: agent.model.q_and_value(states, a)[0], numpy(mu))
    np.testing.assert_allclose(slope, 0, atol=1e-6)

    precision = numpy(agent.model.precision(states))
    np.testing.assert_array_equal(precision, precision.transpose(0, 2, 1))
    assert (np.linalg.eigvalsh(precision) > 0).all()
    flat = numpy(agent.L_model(states))
    lower = np.array([naive_lower(row, nb_actions, mode) for row in flat])
    np.testing.assert_allclose(precision, lower @ lower.transpose(0, 2, 1), rtol=1e-5, atol=1e-6)
    columns = []  # -d2Q/da2, exact for a quadratic: how the slope changes over a step of 1
    for i in range(nb_actions):
        moved = numpy(mu) + np.eye(nb_actions, dtype="f4")[i]
        columns.append(-value_and_gradient(lambda a: agent.model.q_and_value(states, a)[0], moved)[1])
    np.testing.assert_allclose(np.stack(columns, axis=2), precision, rtol=1e-4, atol=1e-5)


def test_the_combined_model_gives_q_of_the_action_and_the_observations():
    agent = make_agent(2)
    rng = np.random.default_rng(0)
    states, action = rng.normal(size=(5, 1, 3)).astype("f4"), rng.normal(size=(5, 2)).astype("f4")
    q = agent.combined_model([action, states])
    assert q.shape == (5, 1)
    np.testing.assert_array_equal(numpy(q)[:, 0], agent.model.q_and_value(states, action)[0])
    assert agent.combined_model is agent.model
