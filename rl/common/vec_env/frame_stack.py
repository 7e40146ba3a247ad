"""The last observations of each lane in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl.common.misc_util import tree_map, tree_paths
from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.wrapper import StepResult, VecEnvWrapper, with_final_obs

__all__ = ["VecFrameStack"]


class VecFrameStack(VecEnvWrapper):
    """The last k observations of each lane along a new axis: ``(N, *obs)`` becomes ``(N, k, *obs)``, oldest first.

    Never across episodes: a new episode begins with its first observation k times (``padding="reset"``, as
    Gymnasium's ``FrameStackObservation``) or after zeros (``padding="zero"``, as keras-rl); the final observation of
    an episode is stacked on that episode's own frames. A replay memory with ``window_length=k`` does the same and
    stores each frame once: use one of the two.

    Args:
        venv: The vector env to wrap; its observations are arrays, or dicts and tuples of them.
        nb_frames: k, at least 1.
        padding: ``"reset"`` or ``"zero"``.

    Raises:
        TypeError: If an observation holds what is no array, such as text.
        ValueError: For `nb_frames` below 1 or an unknown padding.
    """

    def __init__(self, venv: VecEnv, nb_frames: int, padding: str = "reset") -> None:
        if isinstance(nb_frames, bool) or not isinstance(nb_frames, (int, np.integer)) or nb_frames < 1:
            raise ValueError(f"nb_frames must be an integer of at least 1, got {nb_frames!r}.")
        if padding not in ("reset", "zero"):
            raise ValueError(f"padding must be 'reset' or 'zero', got {padding!r}.")
        self.nb_frames, self.padding = int(nb_frames), padding
        stacked = None
        if isinstance(venv, VecEnv):
            for path, part in tree_paths(venv.observation_space):
                if not isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
                    raise TypeError(f"VecFrameStack stacks arrays, but observation{path} is {part}.")
            stacked = batch_space(venv.observation_space, self.nb_frames)
        super().__init__(venv, stacked)
        self._stack: Any = None
        self._ended = np.zeros(self.num_envs, bool)

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset; the lanes that were reset begin a new stack."""
        observations, infos = self.venv.reset(seed=seed, options=options, mask=mask)
        lanes = self.lane_mask(mask)
        if self._stack is None:
            lanes = np.ones(self.num_envs, bool)
            self._stack = tree_map(lambda leaf: np.stack([leaf] * self.nb_frames, axis=1), observations)
        self._stack = self._begin(self._stack, observations, lanes)
        self._ended[lanes] = False
        self._last_step = None
        return tree_map(np.copy, self._stack), infos

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step and stack what it returned."""
        observations, rewards, terminated, truncated, infos = self.venv.step_wait(timeout)
        old = self._stack

        def stack_final(lane: int, final: Any) -> Any:
            return tree_map(lambda frames, leaf: np.concatenate([frames[lane, 1:], [leaf]]), old, final)

        infos = with_final_obs(infos, stack_final)
        fresh = self._ended if self._mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self._ended = terminated | truncated
        if self._mode is AutoresetMode.SAME_STEP:
            fresh = self._ended
        moved = tree_map(lambda frames, leaf: np.concatenate([frames[:, 1:], leaf[:, None]], axis=1), old, observations)
        self._stack = self._begin(moved, observations, fresh)
        result = tree_map(np.copy, self._stack)
        self._last_step = (result, infos)
        return result, rewards, terminated, truncated, infos

    def _begin(self, stack: Any, observations: Any, lanes: np.ndarray) -> Any:
        """Begin the stacks of some lanes anew, in place: nobody else holds them."""
        if not lanes.any():
            return stack

        def begin(frames: np.ndarray, leaf: np.ndarray) -> np.ndarray:
            frames[lanes] = leaf[lanes][:, None] if self.padding == "reset" else 0
            frames[lanes, -1] = leaf[lanes]
            return frames

        return tree_map(begin, stack, observations)
