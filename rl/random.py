"""Noise for exploration with continuous actions, one process per lane."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from rl.util import RandomStream

__all__ = [
    "AnnealedGaussianProcess",
    "GaussianWhiteNoiseProcess",
    "OrnsteinUhlenbeckProcess",
    "RandomProcess",
]

register = keras.saving.register_keras_serializable(package="rl")


class RandomProcess(RandomStream):
    """Base class of noise processes: override `sample`, and `reset_states` if there is anything to reset."""

    def sample(self, nb_lanes: int | None = None) -> np.ndarray:
        """Draws the noise of the next step.

        Args:
            nb_lanes: Number of lanes, N. None means one lane, without an axis for it.

        Returns:
            ``(N, *size)`` float64, or ``(*size,)`` for ``nb_lanes=None``.
        """
        raise NotImplementedError(f"{type(self).__name__} must override sample.")

    def reset_states(self, lanes: ArrayLike | None = None) -> None:
        """Begins a new episode in some lanes.

        Args:
            lanes: Indices of the lanes or a bool mask over them; None means all.
        """

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RandomProcess:
        """Makes a process from what `get_config` returned."""
        return cls(**config)


class AnnealedGaussianProcess(RandomProcess):
    """Base class of Gaussian noise whose scale falls linearly from `sigma` to `sigma_min`.

    Args:
        mu: Mean, a number or one per action.
        sigma: Scale at the start, at least 0, a number or one per action.
        sigma_min: Scale in the end, at most `sigma`. None: the scale stays as it is.
        n_steps_annealing: Length of the schedule in env steps, summed over lanes, above 0.

    Attributes:
        n_steps: Steps drawn so far, summed over lanes. It is part of `get_state`.
    """

    def __init__(
        self,
        mu: ArrayLike,
        sigma: ArrayLike,
        sigma_min: ArrayLike | None = None,
        n_steps_annealing: float = 1000,
    ):
        if np.any(np.less(sigma, 0)) or (sigma_min is not None and np.any(np.less(sigma_min, 0))):
            raise ValueError(f"sigma and sigma_min must be at least 0, got {sigma!r} and {sigma_min!r}.")
        if sigma_min is not None and np.any(np.greater(sigma_min, sigma)):
            raise ValueError(f"sigma_min must not be above sigma, got {sigma_min!r} and {sigma!r}.")
        if not n_steps_annealing > 0:
            raise ValueError(f"n_steps_annealing must be above 0, got {n_steps_annealing!r}.")
        self.mu: Any = mu
        self.sigma = sigma
        self.sigma_min = sigma_min
        self.n_steps_annealing = n_steps_annealing
        self.n_steps = 0

    @property
    def current_sigma(self) -> Any:
        """The scale of the next draw: a float, or one per action where `sigma` has one."""
        if self.sigma_min is None:
            return self.sigma
        done = min(self.n_steps / self.n_steps_annealing, 1.0)
        sigma = (1.0 - done) * np.asarray(self.sigma) + done * np.asarray(self.sigma_min)
        return sigma if sigma.ndim else float(sigma)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "mu": _plain(self.mu),
            "sigma": _plain(self.sigma),
            "sigma_min": _plain(self.sigma_min),
            "n_steps_annealing": self.n_steps_annealing,
        }

    def get_state(self) -> dict[str, Any]:
        """Returns the random stream and the step of the schedule."""
        return {**super().get_state(), "n_steps": self.n_steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot."""
        super().set_state(state)
        self.n_steps = int(state["n_steps"])


@register
class GaussianWhiteNoiseProcess(AnnealedGaussianProcess):
    """Independent noise in every step: ``N(mu, sigma^2)``.

    Args:
        mu: Mean, a number or one per action.
        sigma: Standard deviation at the start, a number or one per action.
        sigma_min: Standard deviation in the end; None: it stays `sigma`.
        n_steps_annealing: Length of the schedule in env steps, summed over lanes.
        size: Number of actions, or shape of one lane's noise.
    """

    def __init__(
        self,
        mu: ArrayLike = 0.0,
        sigma: ArrayLike = 1.0,
        sigma_min: ArrayLike | None = None,
        n_steps_annealing: float = 1000,
        size: int | tuple[int, ...] = 1,
    ):
        super().__init__(mu, sigma, sigma_min, n_steps_annealing)
        self.size = size

    def sample(self, nb_lanes: int | None = None) -> np.ndarray:
        """Draws the noise of the next step, ``(N, *size)``, or ``(*size,)`` for ``nb_lanes=None``."""
        lanes = 1 if nb_lanes is None else nb_lanes
        noise = self.rng.normal(self.mu, self.current_sigma, (lanes, *_shape(self.size)))
        self.n_steps += lanes
        return noise[0] if nb_lanes is None else noise

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "size": _plain(self.size)}


@register
class OrnsteinUhlenbeckProcess(AnnealedGaussianProcess):
    """Noise that is correlated over the steps of an episode and returns to `mu` (Ornstein & Uhlenbeck 1930).

    ``x <- x + theta (mu - x) dt + sigma sqrt(dt) N(0, 1)`` in every step. An episode begins at a draw from
    ``N(mu, sigma^2)``, as in keras-rl. In the long run the standard deviation is
    ``sigma sqrt(dt) / sqrt(1 - (1 - theta dt)^2)`` and the correlation of neighbouring steps ``1 - theta dt``:
    with the default `dt` of 0.01 and ``theta=0.15`` noise lasts for about 670 steps, longer than many episodes.
    The DDPG paper (arXiv:1509.02971) uses ``theta=0.15, sigma=0.2`` with ``dt=1``.

    Args:
        theta: Speed of the return to `mu`, at least 0.
        mu: Mean, a number or one per action.
        sigma: Scale of the noise at the start, a number or one per action.
        dt: Length of a step, above 0.
        size: Number of actions, or shape of one lane's noise.
        sigma_min: Scale in the end; None: it stays `sigma`.
        n_steps_annealing: Length of the schedule in env steps, summed over lanes.
    """

    def __init__(
        self,
        theta: float,
        mu: ArrayLike = 0.0,
        sigma: ArrayLike = 1.0,
        dt: float = 1e-2,
        size: int | tuple[int, ...] = 1,
        sigma_min: ArrayLike | None = None,
        n_steps_annealing: float = 1000,
    ):
        super().__init__(mu, sigma, sigma_min, n_steps_annealing)
        if not theta >= 0 or not dt > 0 or theta * dt >= 2:
            raise ValueError(
                "theta must be at least 0, dt above 0 and theta * dt below 2 (or the noise grows for ever), "
                f"got theta={theta!r}, dt={dt!r}."
            )
        self.theta = theta
        self.dt = dt
        self.size = size
        self.x_prev: np.ndarray | None = None

    def sample(self, nb_lanes: int | None = None) -> np.ndarray:
        """Draws the noise of the next step, ``(N, *size)``, or ``(*size,)`` for ``nb_lanes=None``.

        A number of lanes other than before begins anew in all of them.
        """
        lanes = 1 if nb_lanes is None else nb_lanes
        x = self.x_prev
        if x is None or len(x) != lanes:
            x = self._initial(lanes)
        noise = self.rng.normal(size=x.shape)
        x = x + self.theta * (self.mu - x) * self.dt + self.current_sigma * np.sqrt(self.dt) * noise
        self.x_prev = x
        self.n_steps += lanes
        return x[0].copy() if nb_lanes is None else x.copy()

    def reset_states(self, lanes: ArrayLike | None = None) -> None:
        """Begins a new episode in the lanes of these indices (or this bool mask); None means all."""
        if lanes is None:
            self.x_prev = None
        elif self.x_prev is not None:
            lanes = np.asarray(lanes)
            chosen = np.arange(len(self.x_prev))[lanes if lanes.dtype == bool else lanes.astype(int)]
            self.x_prev[chosen] = self._initial(chosen.size).reshape(self.x_prev[chosen].shape)

    def _initial(self, nb_lanes: int) -> np.ndarray:
        return self.rng.normal(self.mu, self.current_sigma, (nb_lanes, *_shape(self.size)))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "theta": self.theta, "dt": self.dt, "size": _plain(self.size)}

    def get_state(self) -> dict[str, Any]:
        """Returns the random stream, the step of the schedule and where every lane's noise is."""
        return {**super().get_state(), "x_prev": _plain(self.x_prev)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `get_state()` snapshot."""
        super().set_state(state)
        self.x_prev = None if state["x_prev"] is None else np.array(state["x_prev"], np.float64)


def _shape(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size,) if isinstance(size, (int, np.integer)) else tuple(size)


def _plain(value: Any) -> Any:
    return None if value is None else np.asarray(value).tolist()
