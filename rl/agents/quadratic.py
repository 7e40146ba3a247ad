"""A Q that is quadratic in a continuous action: the parabola as a layer, and the model of three networks around it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from rl.common.misc_util import tree_leaves, tree_map, warn_user
from rl.networks import check_fit, check_output, feed, network_inputs

_MODES = ("full", "diag")
_LARGEST = 10.0  # where the exponential of the diagonal goes on as a straight line: it is 22,026 there


@keras.saving.register_keras_serializable(package="rl")
class NAFLayer(keras.layers.Layer):
    """The advantage of an action, quadratic in it (Gu et al. 2016, arXiv:1603.00748, eq. 3).

        A(s, a) = -1/2 (a - mu)^T P (a - mu),    P = L L^T

    The inputs are `[L_flat, mu, a]`. L is lower triangular and filled row by row, its diagonal exponentiated: of two
    actions `[[exp(l0), 0], [l1, exp(l2)]]`. In mode `"diag"` it is the diagonal alone, `[[exp(l0), 0], [0, exp(l1)]]`.
    So P is positive definite, whatever the networks say, and mu is the one maximum.

    Differs from the paper in: the exponential goes on as its tangent above 10, and has 1e-7 added, so that no network
    makes P infinite or singular.

    Args:
        nb_actions: Number of action components, A.
        mode: `"full"`, of `A (A + 1) / 2` entries, or `"diag"`, of A.
        **kwargs: Passed to `keras.layers.Layer`. The layer computes in float32 unless `dtype` says otherwise.

    Raises:
        ValueError: The mode is none of these, or an input has another size; the message has both.
    """

    def __init__(self, nb_actions: int, mode: str = "full", **kwargs: Any):
        if mode not in _MODES:
            raise ValueError(f"covariance_mode (mode of NAFLayer) must be 'full' or 'diag', got {mode!r}")
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.nb_actions, self.mode = int(nb_actions), mode
        self.nb_elements = self.nb_actions * (self.nb_actions + 1) // 2 if mode == "full" else self.nb_actions
        rows, columns = np.tril_indices(self.nb_actions) if mode == "full" else np.diag_indices(self.nb_actions)
        self._places = np.full((self.nb_actions, self.nb_actions), self.nb_elements)  # of each entry of L; beyond: 0
        self._places[rows, columns] = np.arange(self.nb_elements)
        self._on_diagonal = rows == columns

    def build(self, input_shape: Any) -> None:
        """Checks the sizes of `[L_flat, mu, a]`."""
        got = [tuple(shape) for shape in input_shape]
        sizes = [self.nb_elements, self.nb_actions, self.nb_actions]
        fits = [len(shape) == 2 and shape[1] in (None, n) for shape, n in zip(got, sizes, strict=False)]
        if len(got) != 3 or not all(fits):
            raise ValueError(
                f"NAFLayer({self.nb_actions}, mode={self.mode!r}) takes [L_flat, mu, a] of shapes "
                f"{[(None, n) for n in sizes]}, got {got}"
            )
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The advantage `(B, 1)` of `[L_flat, mu, a]`."""
        flat, mu, action = inputs
        projected = ops.sum(self.cholesky(flat) * (action - mu)[:, :, None], axis=1)  # L^T (a - mu)
        return -0.5 * ops.sum(ops.square(projected), axis=-1, keepdims=True)

    def cholesky(self, flat: Any) -> Any:
        """L, `(B, A, A)`, of its entries `(B, nb_elements)`."""
        low = ops.minimum(flat, _LARGEST)
        entries = ops.where(self._on_diagonal, ops.exp(low) * (1.0 + flat - low) + 1e-7, flat)
        return ops.take(ops.pad(entries, [[0, 0], [0, 1]]), self._places, axis=1)

    def precision(self, flat: Any) -> Any:
        """P, `(B, A, A)`, of the entries of L."""
        lower = self.cholesky(flat)
        return ops.sum(lower[:, :, None, :] * lower[:, None, :, :], axis=-1)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        """`(B, 1)`."""
        return input_shape[0][0], 1

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return super().get_config() | {"nb_actions": self.nb_actions, "mode": self.mode}


class NAFModel(keras.Model):
    """Q of states and actions, made of three networks of the states.

    Its weights stand in keras-rl's order: those of `L_model`, `mu_model`, `V_model`.

    Args:
        V_model: Keras network to the value, `(None, 1)`.
        L_model: Keras network to the entries of L; see `NAFLayer`. One with the action as first of its inputs, which
            keras-rl demanded, is given zeros for it.
        mu_model: Keras network to the action of the largest Q, `(None, nb_actions)`.
        nb_actions: A.
        mode: As in `NAFLayer`.
        owner: The agent's class name, for messages.

    Attributes:
        naf_layer: The `NAFLayer`.

    Raises:
        ValueError: A network has another output.
    """

    def __init__(
        self,
        V_model: keras.Model,
        L_model: keras.Model,
        mu_model: keras.Model,
        nb_actions: int,
        mode: str = "full",
        owner: str = "NAFAgent",
    ):
        super().__init__(dtype="float32")  # the networks keep their own policies; the quadratic form is float32
        self.naf_layer = NAFLayer(nb_actions, mode)
        sizes = {"V_model": 1, "L_model": self.naf_layer.nb_elements, "mu_model": nb_actions}
        self._sizes = {name: (n, f"{owner} ({name})") for name, n in sizes.items()}
        for name, network in (("V_model", V_model), ("L_model", L_model), ("mu_model", mu_model)):
            check_output(network, *self._sizes[name])
        # The order of these lines is part of the file format: Keras stores weights by order of assignment.
        self.L_model, self.mu_model, self.V_model = L_model, mu_model, V_model
        inputs = network_inputs(L_model)
        self.takes_action = len(inputs) == len(network_inputs(mu_model)) + 1 and inputs[0].shape[-1] == nb_actions
        if self.takes_action:
            warn_user(
                f"{owner}: L_model is given zeros for its input {inputs[0].name!r}, the action: mu is no maximum of Q "
                "where the curvature depends on the action. Fix: an L_model of the observations alone"
            )
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Q, `(B, 1)`, of `[action, *observations]`, `(B, A)` and `(B, W, *obs)`."""
        action, *states = inputs
        return self.q_and_value(states[0] if len(states) == 1 else tuple(states), action, training)[0][:, None]

    def q_and_value(self, states: Any, action: Any, training: bool = False) -> tuple[Any, Any]:
        """Q(s, a) and V(s), `(B,)` float32 each, of states `(B, W, *obs)` and actions `(B, A)`."""
        value = value_of(self.V_model, states, training)
        mu = self.mu(states, training)
        advantage = self.naf_layer([self._entries(states, training), mu, ops.cast(action, "float32")])
        return value + advantage[:, 0], value

    def mu(self, states: Any, training: bool = False) -> Any:
        """The action of the largest Q, `(B, A)` float32."""
        return ops.cast(self.mu_model(feed(self.mu_model, states), training=training), "float32")

    def precision(self, states: Any) -> Any:
        """The curvature P, `(B, A, A)` float32."""
        return self.naf_layer.precision(self._entries(states, False))

    def _entries(self, states: Any, training: bool) -> Any:
        fed = feed(self.L_model, self._for_precision(states))
        return ops.cast(self.L_model(fed, training=training), "float32")

    def _for_precision(self, states: Any) -> Any:
        if not self.takes_action:
            return states
        states = tree_map(ops.convert_to_tensor, states)  # Keras wants all inputs of a network to be of one kind
        nb_rows = ops.shape(tree_leaves(states)[0])[0]
        return ops.zeros((nb_rows, 1, self.naf_layer.nb_actions)), states

    def check_states(self, states: Any) -> None:
        """Raises `ValueError` where a network cannot take states `(N, W, *obs)`."""
        check_fit(self.V_model, states, *self._sizes["V_model"])
        check_fit(self.L_model, self._for_precision(states), *self._sizes["L_model"])
        check_fit(self.mu_model, states, *self._sizes["mu_model"])


def value_of(network: keras.Model, states: Any, training: bool = False) -> Any:
    """V(s), `(B,)` float32, of a value network."""
    return ops.cast(network(feed(network, states), training=training), "float32")[:, 0]
