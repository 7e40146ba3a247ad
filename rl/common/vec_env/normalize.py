"""Observations and rewards on a common scale, by running statistics over all lanes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.utils import RunningMeanStd

from rl.common.misc_util import tree_paths
from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.wrapper import StepResult, VecEnvWrapper, layers, with_final_obs

__all__ = ["VecNormalize", "frozen_statistics"]

_NORMALIZE_SETTINGS = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


class VecNormalize(VecEnvWrapper):
    """Observations with mean 0 and variance 1, rewards scaled to returns of variance 1, over all lanes together.

    An observation becomes ``clip((x - mean) / sqrt(var + epsilon), -clip_obs, clip_obs)`` as float32, final
    observations alike; a reward is divided by the square root of the variance of the discounted return ``R = gamma * R
    + r`` of its lane (it is not centred, which would change the task) and clipped. The running statistics are
    Gymnasium's ``RunningMeanStd``. They are updated by what `reset` and `step` return while `training` is True, and
    frozen while it is False: use `frozen_statistics`, or set it. ``infos[i]["episode"]`` keeps the env's own rewards.

    Args:
        venv: The vector env to wrap.
        training: Whether the statistics are updated.
        norm_obs: Whether observations are normalised.
        norm_reward: Whether rewards are normalised.
        clip_obs: Bound of a normalised observation.
        clip_reward: Bound of a normalised reward.
        gamma: Discount of the return whose variance scales the rewards.
        epsilon: Keeps the division finite.
        norm_obs_keys: For ``Dict`` observations, the top-level keys to normalise; None: all ``Box`` parts.

    Attributes:
        obs_rms: Dict from the path of an observation's part to its ``RunningMeanStd`` (``mean``, ``var``, ``count``).
        return_rms: The one of the discounted returns.

    Raises:
        TypeError: If there is no ``Box`` observation to normalise.
        ValueError: For an unknown key, or a number out of range.
    """

    def __init__(
        self,
        venv: VecEnv,
        training: bool = True,
        norm_obs: bool = True,
        norm_reward: bool = True,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        norm_obs_keys: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(venv, VecEnv):
            super().__init__(venv)  # says what is wrong
        for name, value in (("clip_obs", clip_obs), ("clip_reward", clip_reward), ("epsilon", epsilon)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {gamma}.")
        self.training = training
        self.norm_obs, self.norm_reward = norm_obs, norm_reward
        self.clip_obs, self.clip_reward = float(clip_obs), float(clip_reward)
        self.gamma, self.epsilon = float(gamma), float(epsilon)
        self.norm_obs_keys = None if norm_obs_keys is None else list(norm_obs_keys)
        self.obs_rms: dict[str, RunningMeanStd] = {}
        self.return_rms = RunningMeanStd(shape=())
        self.returns = np.zeros(venv.num_envs)
        self._original_obs: Any = None
        self._original_reward = np.zeros(venv.num_envs)
        space = venv.observation_space
        if norm_obs:
            self.obs_rms = {
                path: RunningMeanStd(shape=part.shape)
                for path, part in tree_paths(space)
                if isinstance(part, spaces.Box) and _is_chosen(path, norm_obs_keys)
            }
            self._check_keys(space, norm_obs_keys)
        super().__init__(venv, _map_space(space, self._normalized_space))
        self._ended = np.zeros(self.num_envs, bool)

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset; the statistics take in the observations of the lanes that were reset."""
        lanes = self.lane_mask(mask)
        observations, infos = self.venv.reset(seed=seed, options=options, mask=mask)
        self._original_obs, self._last_step = observations, None
        self.returns[lanes], self._ended[lanes] = 0.0, False
        if self.training:
            self._update_obs(observations, lanes)
        return self.normalize_obs(observations), infos

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step and normalise what it returned."""
        observations, rewards, terminated, truncated, infos = self.venv.step_wait(timeout)
        self._original_obs, self._original_reward = observations, rewards
        # Under NEXT_STEP a lane that has ended only resets itself now: its reward of 0 belongs to no return.
        real = ~self._ended if self._mode is AutoresetMode.NEXT_STEP else np.ones(self.num_envs, bool)
        self._ended = terminated | truncated
        self.returns[real] = self.gamma * self.returns[real] + rewards[real]
        if self.training:
            self._update_obs(observations, np.ones(self.num_envs, bool))
            if self.norm_reward and real.any():
                self.return_rms.update(self.returns[real])
        self.returns[self._ended] = 0.0
        infos = with_final_obs(infos, self._normalize_one)
        observations = self.normalize_obs(observations)
        self._last_step = (observations, infos)
        return observations, self.normalize_reward(rewards), terminated, truncated, infos

    def normalize_obs(self, observations: Any) -> Any:
        """Normalise observations with the present statistics, which do not change.

        Args:
            observations: Of N lanes, or any number of rows (..., *obs).

        Returns:
            The same as float32, where they are normalised at all.
        """
        return _map_paths(observations, self._normalize_part)

    def unnormalize_obs(self, observations: Any) -> Any:
        """Undo `normalize_obs`, but for what was clipped.

        Args:
            observations: Normalised rows (..., *obs).

        Returns:
            Rows in the env's scale, as float64.
        """

        def part(path: str, leaf: Any) -> Any:
            rms = self.obs_rms.get(path)
            return leaf if rms is None else leaf * np.sqrt(rms.var + self.epsilon) + rms.mean

        return _map_paths(observations, part)

    def normalize_reward(self, rewards: np.ndarray) -> np.ndarray:
        """Scale and clip rewards with the present statistics, which do not change.

        Args:
            rewards: Any shape.

        Returns:
            The normalised rewards, or `rewards` where they are not normalised.
        """
        if not self.norm_reward:
            return rewards
        return np.clip(rewards / np.sqrt(self.return_rms.var + self.epsilon), -self.clip_reward, self.clip_reward)

    def unnormalize_reward(self, rewards: np.ndarray) -> np.ndarray:
        """Undo `normalize_reward`, but for what was clipped.

        Args:
            rewards: Any shape.

        Returns:
            Rewards in the env's scale.
        """
        return rewards * np.sqrt(self.return_rms.var + self.epsilon) if self.norm_reward else rewards

    def get_original_obs(self) -> Any:
        """The latest observations (N, *obs) as the env returned them."""
        return self._original_obs

    def get_original_reward(self) -> np.ndarray:
        """The latest rewards (N,) as the env returned them."""
        return self._original_reward

    def get_state(self) -> dict[str, np.ndarray]:
        """The statistics as a flat dict of arrays, for `set_state` or a checkpoint."""
        state = {}
        for name, rms in (("return", self.return_rms), *((f"obs{path}", rms) for path, rms in self.obs_rms.items())):
            state.update({f"{name}/mean": rms.mean, f"{name}/var": rms.var, f"{name}/count": rms.count})
        return {key: np.array(value, np.float64) for key, value in state.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Take over the statistics that `get_state` returned, of this or another `VecNormalize`.

        Args:
            state: Its dict.

        Raises:
            ValueError: If they are those of other observations; nothing is changed then.
        """
        own = self.get_state()
        if own.keys() != state.keys():
            raise ValueError(f"The statistics are of other observations: expected {sorted(own)}, got {sorted(state)}.")
        for key, value in own.items():
            if np.shape(state[key]) != value.shape:
                raise ValueError(
                    f"The statistics {key!r} are of other observations: expected shape {value.shape}, got "
                    f"{np.shape(state[key])}."
                )
        for name, rms in (("return", self.return_rms), *((f"obs{path}", rms) for path, rms in self.obs_rms.items())):
            rms.mean = np.array(state[f"{name}/mean"], np.float64)
            rms.var = np.array(state[f"{name}/var"], np.float64)
            rms.count = float(state[f"{name}/count"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write statistics and settings to a NumPy ``.npz`` file (no pickle), in one go: never half a file.

        Args:
            path: The file's name, taken as it is.
        """
        state = self.get_state()
        settings = {name: getattr(self, name) for name in _NORMALIZE_SETTINGS}
        # Names of statistics go into the text: as names of the archive's members, their slashes would be folders.
        header = json.dumps({"settings": settings, "names": list(state)})
        path = Path(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                np.savez(file, *state.values(), header=np.array(header))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    def load_statistics(self, path: str | os.PathLike[str]) -> None:
        """Take over the statistics of a file written by `save`; the settings stay as they are.

        Args:
            path: The file's name.

        Raises:
            ValueError: If the file holds the statistics of other observations.
        """
        self.set_state(_read_normalize_file(path)[1])

    @classmethod
    def load(cls, path: str | os.PathLike[str], venv: VecEnv, training: bool = False) -> VecNormalize:
        """Wrap a vector env with the statistics and settings of a file written by `save`.

        Args:
            path: The file's name.
            venv: The vector env, of the same observations.
            training: Whether the statistics go on being updated; by default they are frozen.

        Returns:
            The wrapped vector env.
        """
        settings, state = _read_normalize_file(path)
        wrapped = cls(venv, training=training, **settings)
        wrapped.set_state(state)
        return wrapped

    def _check_keys(self, space: spaces.Space[Any], keys: Sequence[str] | None) -> None:
        if keys is not None:
            if not isinstance(space, spaces.Dict):
                raise ValueError(f"norm_obs_keys is for Dict observations, got {space}.")
            if unknown := [key for key in keys if not isinstance(space.spaces.get(key), spaces.Space)]:
                raise ValueError(f"norm_obs_keys has unknown keys {unknown}; the observation has {list(space)}.")
        if not self.obs_rms:
            raise TypeError(f"VecNormalize needs a Box observation to normalise, got {space}; or pass norm_obs=False.")

    def _normalized_space(self, path: str, part: spaces.Space[Any]) -> spaces.Space[Any]:
        if path not in self.obs_rms:
            return part
        return spaces.Box(-self.clip_obs, self.clip_obs, part.shape, np.float32)

    def _normalize_part(self, path: str, leaf: Any) -> Any:
        rms = self.obs_rms.get(path)
        if rms is None:
            return leaf
        normalized = (leaf - rms.mean) / np.sqrt(rms.var + self.epsilon)
        return np.clip(normalized, -self.clip_obs, self.clip_obs).astype(np.float32)

    def _normalize_one(self, lane: int, observation: Any) -> Any:
        return self.normalize_obs(observation)

    def _update_obs(self, observations: Any, lanes: np.ndarray) -> None:
        if lanes.any():
            for path, leaf in tree_paths(observations):
                if path in self.obs_rms:
                    self.obs_rms[path].update(np.asarray(leaf[lanes], np.float64))


@contextlib.contextmanager
def frozen_statistics(env: Any) -> Iterator[None]:
    """Switch off ``training`` of every vector wrapper around `env` that has it, for as long as the block runs.

    For testing an agent on the env it trains on: `VecNormalize` goes on normalising but learns nothing.

    Args:
        env: Any environment; one without such wrappers is left as it is.
    """
    switched = [layer for layer in layers(env) if getattr(layer, "__dict__", {}).get("training") is True]
    for layer in switched:
        layer.training = False
    try:
        yield
    finally:
        for layer in switched:
            layer.training = True


def _read_normalize_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as file:
        if "header" not in file:
            raise ValueError(f"{os.fspath(path)} was not written by VecNormalize.save.")
        header = json.loads(str(file["header"]))
        return header["settings"], {name: file[f"arr_{index}"] for index, name in enumerate(header["names"])}


def _map_paths(tree: Any, fn: Callable[[str, Any], Any], path: str = "") -> Any:
    if isinstance(tree, dict):
        return {key: _map_paths(value, fn, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_map_paths(value, fn, f"{path}[{index}]") for index, value in enumerate(tree))
    return fn(path, tree)


def _map_space(space: Any, fn: Callable[[str, Any], Any], path: str = "") -> Any:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _map_space(part, fn, f"{path}[{key!r}]") for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_map_space(part, fn, f"{path}[{index}]") for index, part in enumerate(space.spaces)])
    return fn(path, space)


def _is_chosen(path: str, keys: Sequence[str] | None) -> bool:
    return keys is None or any(path == f"[{key!r}]" or path.startswith(f"[{key!r}][") for key in keys)
