"""`as_lanes`: any environment as a vector of lanes; `SingleEnv` makes one of a single env, also of the older API."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rl.common.vec_env.adapters import from_gymnasium
from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.errors import ClosedEnvironmentError

__all__ = ["SingleEnv", "as_lanes"]


def as_lanes(env: Any) -> Any:
    """The env as something that resets and steps N lanes.

    Args:
        env: A `VecEnv`, which is returned as it is, a ``gymnasium.vector.VectorEnv``, which `from_gymnasium` adapts, or
            a single env, which becomes a `SingleEnv`.

    Raises:
        TypeError: If it lacks ``reset`` or ``step``, is a class or a vector env of an unknown kind.
        ClosedEnvironmentError: If it is closed.
    """
    name = _name_of(env)
    if isinstance(env, type):
        raise TypeError(f"env must be an environment, got the class {env.__name__} itself: create one.")
    missing = [f"{method}()" for method in ("reset", "step") if not callable(getattr(env, method, None))]
    if missing:
        raise TypeError(f"{name} is no environment: it has no {' and no '.join(missing)} as gymnasium.Env has.")
    if getattr(env, "closed", False) is True:
        raise ClosedEnvironmentError(f"{name} is closed: create a new one.")
    if isinstance(env, VecEnv):
        return env
    if isinstance(env, VectorEnv):
        return from_gymnasium(env)
    if hasattr(env, "num_envs") and not isinstance(env, gymnasium.Env):
        raise TypeError(f"{name} is neither an rl.common.vec_env.VecEnv nor a gymnasium.vector.VectorEnv.")
    return SingleEnv(env)


class SingleEnv:
    """Gives an env the interface of a vector env of one lane that never resets itself.

    Only what can be converted without a loss is: observations stay the env's own objects, in a list of one,
    so that a processor sees what the env gave.

    In the older API ``reset()`` returns the observation alone and ``step()`` four values ``(observation,
    reward, done, info)``; there, ``done`` with a true ``info["TimeLimit.truncated"]`` is a truncation, any
    other a termination.

    Args:
        env: Anything with ``reset()`` and ``step(action)``. Spaces that it does not declare are None here.
    """

    num_envs = 1
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = getattr(env, "observation_space", None)
        self.action_space = getattr(env, "action_space", None)

    def reset(self, seed: int | None = None, mask: Any = None) -> tuple[list[Any], list[dict[str, Any]]]:
        """Reset the env.

        Args:
            seed: Given to ``reset(seed=...)`` or, where that does not take it, to ``env.seed(seed)``.
            mask: Ignored: there is one lane only.

        Returns:
            Lists of one observation and one info.

        Raises:
            TypeError: If a tuple comes back that is neither (observation, info) nor a ``Tuple`` space's
                observation.
        """
        result = self.env.reset() if seed is None or self._seeded(seed) else self.env.reset(seed=seed)
        if isinstance(result, tuple):
            if len(result) == 2 and isinstance(result[1], dict):
                return [result[0]], [result[1]]
            if not isinstance(self.observation_space, spaces.Tuple):
                raise self._wrong("reset", result, "2 values (observation, info), or the observation alone")
        return [result], [{}]

    def step(self, actions: Any) -> tuple[list[Any], np.ndarray, list[bool], list[bool], list[dict[str, Any]]]:
        """Step the env with the first (the only) action.

        Returns:
            Observation, reward, terminated, truncated, info: each with one entry.

        Raises:
            TypeError: If neither five nor four values come back.
        """
        result = self.env.step(actions[0])
        if isinstance(result, tuple | list) and len(result) == 5:
            observation, reward, terminated, truncated, info = result
        elif isinstance(result, tuple | list) and len(result) == 4:
            observation, reward, done, info = result
            truncated = done and info.get("TimeLimit.truncated", False)
            terminated = done and not truncated
        else:
            raise self._wrong(
                "step", result, "5 values (observation, reward, terminated, truncated, info) or 4 with one `done`"
            )
        # Some older envs give rewards of shape (1,).
        return [observation], np.asarray(reward).reshape(1), [bool(terminated)], [bool(truncated)], [info]

    def _seeded(self, seed: int) -> bool:
        """Seed an env whose ``reset`` takes no seed; False where it does take one."""
        parameters = inspect.signature(self.env.reset).parameters
        if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
        if callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        else:
            warnings.warn(f"{_name_of(self.env)} has no reset(seed=...) and no seed(): it is not seeded.", stacklevel=4)
        return True

    def _wrong(self, method: str, result: Any, wanted: str) -> TypeError:
        given = f"{len(result)} values" if isinstance(result, tuple | list) else f"one {type(result).__name__}"
        return TypeError(f"{_name_of(self.env)}.{method}() returned {given}, expected {wanted}.")


def _name_of(env: Any) -> str:
    return type(getattr(env, "unwrapped", env)).__name__
