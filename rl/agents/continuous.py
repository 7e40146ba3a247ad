"""What agents share whose network says continuous actions: exploration by noise, and the env's bounds."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np

from rl.common.misc_util import tree_map
from rl.random import RandomProcess
from rl.util import RandomStream, require


class ContinuousActions:
    """Mixin of agents on `GradientAgent`, named before their base, whose network's outputs are actions.

    In `fit` noise is added to the outputs and the sum is clipped to the env's bounds; in `test` the outputs are only
    clipped. What is stored is what was executed: an action beyond the bounds would teach the critic that the env
    rewards what it never saw. The bounds are those of the env's action space; a processor's `process_action` comes
    after them.

    Each lane has noise of its own, which starts anew with the lane's episode.

    Args:
        *args: Passed on.
        random_process: Noise of a `RandomProcess` with `size=nb_actions`, or None. In the units of the network's
            outputs.
        scale_actions: False: the network's outputs are in the env's units, as in keras-rl. True: they are in [-1, 1],
            and mapped linearly to each component's bounds. The memory, and so the critic, then has actions in [-1, 1].
        nb_steps_random: Env steps of the agent's life, summed over lanes, whose actions are drawn uniformly from within
            the bounds, whatever the network says.
        **kwargs: Passed on.

    Raises:
        ValueError: The noise is of another size, or none of `rl.random`.
    """

    nb_actions: int

    def __init__(
        self,
        *args: Any,
        random_process: RandomProcess | None = None,
        scale_actions: bool = False,
        nb_steps_random: int = 0,
        **kwargs: Any,
    ):
        require("nb_steps_random", nb_steps_random, nb_steps_random >= 0, "at least 0")
        super().__init__(*args, **kwargs)
        if random_process is not None:
            _check_noise(random_process, self.nb_actions, type(self).__name__)
        self.random_process = random_process
        self.scale_actions = bool(scale_actions)
        self.nb_steps_random = int(nb_steps_random)
        self._acting = _Acting(ActionBounds(None, self.scale_actions))

    # ---- acting -------------------------------------------------------------------------------------------------

    def choose(self: Any, outputs: np.ndarray) -> np.ndarray:
        """Actions `(N, nb_actions)` in the units of the network's outputs, bounds aside: outputs, and noise in `fit`.

        Args:
            outputs: The network's, `(N, ...)` float32.
        """
        noisy = self.training and self.random_process is not None
        self._acting.noisy = noisy
        return outputs + self.random_process.sample(len(outputs)) if noisy else outputs

    def explore(self: Any, outputs: np.ndarray) -> np.ndarray:
        """Actions `(N, nb_actions)` float32, in the env's units and within its bounds; see `ReplayAgent.explore`."""
        acting = self._acting
        bounds = acting.bounds[self.training]
        if self.training and self.step < self.nb_steps_random:
            acting.noisy = False
            return bounds.executed(bounds.uniform(acting.stream.rng, (len(outputs), self.nb_actions)))
        return bounds.executed(self.choose(outputs))

    def select_action(self: Any, state: Any) -> np.ndarray:
        """One action `(nb_actions,)` for one state, a list of `window_length` observations, as `fit` or `test` would.

        Which of the two is said by `agent.training`.
        """
        frames = tree_map(lambda *parts: np.stack([np.asarray(part) for part in parts])[None], *state)
        return self.explore(self.evaluate(frames))[0]

    def stored_actions(self, actions: np.ndarray) -> np.ndarray:
        """What the memory keeps of executed actions `(..., nb_actions)`: in [-1, 1] with `scale_actions`."""
        return self._acting.bounds[self.training].stored(actions) if self.scale_actions else actions  # type: ignore[attr-defined]

    # ---- set-up, and the course of an episode -------------------------------------------------------------------

    def check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """The actions are one `Box` of `nb_actions` components; see `GradientAgent.check_spaces`."""
        check_continuous(type(self).__name__, self.nb_actions, action_space)
        needs = "scale_actions=True" if self.scale_actions else "nb_steps_random" if self.nb_steps_random else None
        if needs and not ActionBounds(action_space, self.scale_actions).finite:
            raise ValueError(
                f"{type(self).__name__}: {needs} needs an env whose actions are bounded in every component, its "
                f"action space is {action_space}. Fix: gymnasium.wrappers.RescaleAction or TransformAction with a "
                f"bounded Box, or without {needs}"
            )

    def prepare(self: Any, driver: Any, observation: Any) -> None:
        """Also takes the bounds of the env's actions; see `Agent.prepare`."""
        super().prepare(driver, observation)  # type: ignore[misc]
        bounds, given = self._acting.bounds, ActionBounds(driver.action_space, self.scale_actions)
        bounds[self.training] = given
        if not bounds[not self.training].known:  # for one who goes on by hand
            bounds[not self.training] = given

    def open_lanes(self: Any, nb_lanes: int) -> None:
        """Also starts the noise anew; see `Agent.open_lanes`."""
        super().open_lanes(nb_lanes)  # type: ignore[misc]
        if self.training and self.random_process is not None:
            self.random_process.reset_states()

    def observe(self: Any, transition: Any) -> np.ndarray | None:
        """Also starts the noise anew in lanes whose episode begins; see `Agent.observe`."""
        process, invalid = self.random_process, ~transition.valid
        if self.training and process is not None:
            # A lane that only reset itself made no use of its noise: neither its episode nor the schedule goes on.
            if self._acting.noisy and hasattr(process, "n_steps"):
                process.n_steps -= int(np.count_nonzero(invalid))
            begins = invalid | transition.terminated | transition.truncated
            if np.count_nonzero(begins):
                process.reset_states(begins)
        if self.scale_actions:
            transition = transition._replace(action=self.stored_actions(transition.action))
        return super().observe(transition)  # type: ignore[misc]

    def random_streams(self: Any) -> list[Any]:
        """The noise and the uniform actions, too; see `Agent.random_streams`."""
        noise = [] if self.random_process is None else [self.random_process]
        return [*super().random_streams(), *noise, self._acting.stream]  # type: ignore[misc]


class ActionBounds:
    """The bounds of an env's actions, and the mapping of [-1, 1] to them.

    Args:
        space: A `Box`; anything else has no bounds.
        scaled: Whether actions in the network's units are in [-1, 1].
    """

    def __init__(self, space: Any, scaled: bool):
        self.scaled = scaled
        self.known = isinstance(space, gymnasium.spaces.Box)
        self.low: Any = np.float32(-np.inf)
        self.high: Any = np.float32(np.inf)
        if isinstance(space, gymnasium.spaces.Box):
            with np.errstate(over="ignore"):  # bounds beyond float32 are none
                self.low = space.low.astype(np.float32).ravel()
                self.high = space.high.astype(np.float32).ravel()

    @property
    def finite(self) -> bool:
        """Whether there are bounds, in every component."""
        with np.errstate(over="ignore"):  # nor those at its end
            return bool(np.isfinite(self.high - self.low).all())

    @property
    def inner(self) -> tuple[Any, Any]:
        """The bounds in the network's units."""
        return (np.float32(-1), np.float32(1)) if self.scaled else (self.low, self.high)

    def executed(self, actions: np.ndarray) -> np.ndarray:
        """What the env is given for actions in the network's units: within the bounds, float32."""
        if not self.scaled:
            return np.asarray(np.minimum(np.maximum(actions, self.low), self.high), np.float32)
        self._require_bounds()
        inner = np.minimum(np.maximum(actions, -1.0), 1.0)
        # This form gives both ends exactly.
        return np.asarray((0.5 - 0.5 * inner) * self.low + (0.5 + 0.5 * inner) * self.high, np.float32)

    def stored(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of `executed`, for actions within the bounds."""
        if not self.scaled:
            return np.asarray(actions, np.float32)
        self._require_bounds()
        width = np.where(self.high > self.low, self.high - self.low, 1.0)
        inner = (2.0 * (np.asarray(actions, np.float64) - self.low)) / width - 1.0
        return np.clip(inner, -1.0, 1.0).astype(np.float32)

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform actions in the network's units."""
        self._require_bounds()
        return rng.uniform(-1.0, 1.0, shape) if self.scaled else rng.uniform(self.low, self.high, shape)

    def _require_bounds(self) -> None:
        if not self.finite:
            raise ValueError(
                "The bounds of the actions are not known: fit() and test() take them from the env. Fix: call one of "
                "them before forward() or select_action(), or use neither scale_actions nor nb_steps_random"
            )


class _Acting:
    """What changes from step to step. Not attributes of the agent, which Keras is slow to assign.

    Attributes:
        bounds: In `test` and in `fit`: the env of the one may be another than that of the other.
        noisy: Whether the last actions had noise.
        stream: Where uniform actions come from.
    """

    def __init__(self, bounds: ActionBounds):
        self.bounds = [bounds, bounds]
        self.noisy = False
        self.stream = RandomStream()


def check_continuous(owner: str, nb_actions: int, action_space: Any) -> None:
    """Raises where an env's actions are not `nb_actions` continuous ones.

    Args:
        owner: The agent's class name, for the message.
        nb_actions: The network's outputs.
        action_space: The env's; one that is no Gymnasium space passes.

    Raises:
        ValueError: With what the env has, and what to change.
    """
    if not isinstance(action_space, gymnasium.Space):
        return
    if not isinstance(action_space, gymnasium.spaces.Box) or action_space.dtype.kind != "f":
        raise ValueError(
            f"{owner} chooses continuous actions, one Box of floats, the env's action space is {action_space}. Fix: an "
            "agent for discrete actions (DQNAgent), or gymnasium.wrappers.TransformAction"
        )
    size = int(np.prod(action_space.shape))
    if size != nb_actions:
        raise ValueError(
            f"{owner}: nb_actions={nb_actions}, but the env's action has {size} components ({action_space}). "
            f"Fix: nb_actions={size}, and networks for that many"
        )


def _check_noise(process: Any, nb_actions: int, owner: str) -> None:
    require("random_process", process, isinstance(process, RandomProcess), "an instance of rl.random.RandomProcess")
    probe = copy.deepcopy(process)
    probe.rng = 0  # the process itself draws nothing
    try:
        got = f"shape {np.shape(probe.sample(2))}"
    except Exception as error:  # whatever the user's own process raises
        got = f"{type(error).__name__}: {error}"
    if got != f"shape {(2, nb_actions)}":
        raise ValueError(
            f"{owner}: random_process.sample(nb_lanes) must give noise of shape (nb_lanes, {nb_actions}), for two "
            f"lanes it gave {got}. Fix: {type(process).__name__}(size={nb_actions}, ...), or sample(nb_lanes=None) in "
            "a class of your own"
        )
