"""`SingleEnv`: one environment, of Gymnasium's API or the older one, as a vector of one lane."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

__all__ = ["SingleEnv"]


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
                "step", result, "5 values (observation, reward, terminated, truncated, info) or 4 (with one `done`)"
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
            name = type(self.env).__name__
            warnings.warn(f"{name} cannot be seeded: it has no reset(seed=...) and no seed().", stacklevel=4)
        return True

    def _wrong(self, method: str, result: Any, wanted: str) -> TypeError:
        given = f"{len(result)} values" if isinstance(result, tuple | list) else f"one {type(result).__name__}"
        name = type(getattr(self.env, "unwrapped", self.env)).__name__
        return TypeError(f"{name}.{method}() returned {given}, expected {wanted}.")
