"""Wrappers around a whole vector environment: normalising, stacking, monitoring, filming, checking."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.utils import RunningMeanStd

from rl.common.misc_util import tree_map, tree_paths
from rl.common.vec_env.base import VecEnv

__all__ = [
    "VecCheckNan",
    "VecEnvWrapper",
    "VecFrameStack",
    "VecMonitor",
    "VecNormalize",
    "VecVideoRecorder",
    "frozen_statistics",
]

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]


class VecEnvWrapper(VecEnv):
    """A `VecEnv` around another one; everything that a subclass does not override is passed on.

    A subclass overrides `reset` and `step_wait` (and `step_async`, where it looks at actions). If it changes
    observations it gives the new space, changes ``final_obs`` of the infos alike, and keeps ``self._last_step =
    (observations, infos)``, from which `next_obs` is made. Steps of some lanes only (`send`, `recv`, `split`) would
    pass it by, so they are refused there.

    Attributes that neither the wrapper nor the contract has are looked up in the vector envs inside; one that several
    of them have is refused as ambiguous.

    Args:
        venv: The vector env to wrap.
        observation_space: Space of one lane's observation, where the wrapper changes it.
        action_space: Space of one lane's action, where the wrapper changes it.

    Attributes:
        venv: The vector env inside.
    """

    def __init__(
        self,
        venv: VecEnv,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        if not isinstance(venv, VecEnv):
            hint = " Put it into from_gymnasium first." if isinstance(venv, VectorEnv) else ""
            raise TypeError(f"{type(self).__name__} wraps a VecEnv, got {type(venv).__name__}.{hint}")
        self.venv = venv
        super().__init__(
            venv.num_envs,
            venv.observation_space if observation_space is None else observation_space,
            venv.action_space if action_space is None else action_space,
            autoreset_mode=venv.metadata["autoreset_mode"],
            metadata=venv.metadata,
            render_mode=venv.render_mode,
            spec=venv.spec,
        )
        if action_space is None:
            self.action_space = venv.action_space  # also its random stream: seeding one seeds the other
        self._mode: AutoresetMode = self.metadata["autoreset_mode"]

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all lanes or those of the mask; see `VecEnv.reset`."""
        return self.venv.reset(seed=seed, options=options, mask=mask)

    def step_async(self, actions: Any) -> None:
        """Start a step; see `VecEnv.step_async`."""
        self.venv.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step; see `VecEnv.step_wait`."""
        return self.venv.step_wait(timeout)

    def next_obs(self) -> Any:
        """The true successors of the last step; see `VecEnv.next_obs`."""
        return self.venv.next_obs() if self._last_step is None else super().next_obs()

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[int | None]:
        """Store seeds for the next `reset()`; see `VecEnv.seed`."""
        return self.venv.seed(seed)

    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """An attribute of the environments; see `VecEnv.get_attr`."""
        return self.venv.get_attr(name, indices)

    def set_attr(self, name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set an attribute of the environments; see `VecEnv.set_attr`."""
        self.venv.set_attr(name, value, indices)

    def call(self, name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of the environments; see `VecEnv.call`."""
        return self.venv.call(name, *args, indices=indices, **kwargs)

    def has_attr(self, name: str) -> bool:
        """Whether every environment has the attribute; see `VecEnv.has_attr`."""
        return self.venv.has_attr(name)

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether the environments, or the vector env around them, are wrapped in `wrapper_class`."""
        if isinstance(self, wrapper_class):
            return [True for _ in self.lane_indices(indices)]
        return self.venv.env_is_wrapped(wrapper_class, indices)

    def action_masks(self) -> np.ndarray | None:
        """Valid actions now; see `VecEnv.action_masks`."""
        return self.venv.action_masks()

    def get_images(self) -> list[Any]:
        """The frames of all lanes; see `VecEnv.get_images`."""
        return self.venv.get_images()

    def render(self, mode: str | None = None) -> Any:
        """All lanes in one picture; see `VecEnv.render`."""
        return self.venv.render(mode)

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Start a step of some lanes; see `SubprocVecEnv.send`."""
        self._require_plain("send")
        self.venv.send(actions, env_ids)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for some lanes; see `SubprocVecEnv.recv`."""
        self._require_plain("recv")
        return self.venv.recv(min_envs, timeout)

    def split(self, k: int) -> list[VecEnv]:
        """Split into k views over disjoint blocks of lanes; see `VecEnv.split`."""
        self._require_plain("split")
        return self.venv.split(k)

    def close(self, timeout: float = 5.0) -> None:
        """Close the vector env inside. A second call does nothing."""
        self.venv.close(timeout)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self.venv.closed

    @property
    def unwrapped(self) -> VecEnv:
        """The vector env below all wrappers."""
        return self.venv.unwrapped

    def _require_plain(self, what: str) -> None:
        if type(self).step_wait is not VecEnvWrapper.step_wait:
            raise NotImplementedError(
                f"{type(self).__name__} sees whole steps only, so {what}() would pass it by: use step_async() and "
                f"step_wait(), or call {what}() on the vector env inside (.venv)."
            )

    def __getattr__(self, name: str) -> Any:
        if name == "venv" or name.startswith("_"):  # not set yet, or asked for by copy and pickle
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        owners = [layer for layer in _layers(self.venv) if name in vars(layer) or hasattr(type(layer), name)]
        if not owners:
            chain = " > ".join(type(layer).__name__ for layer in _layers(self))
            raise AttributeError(f"None of {chain} has an attribute {name!r}.")
        if len(owners) > 1:
            raise AttributeError(
                f"{name!r} is ambiguous: {' and '.join(type(layer).__name__ for layer in owners)} have it. Ask the one "
                "you mean, by way of .venv."
            )
        return getattr(owners[0], name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.venv!r}>"


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
        infos = _with_final_obs(infos, self._normalize_one)
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


_NORMALIZE_SETTINGS = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


def _read_normalize_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as file:
        if "header" not in file:
            raise ValueError(f"{os.fspath(path)} was not written by VecNormalize.save.")
        header = json.loads(str(file["header"]))
        return header["settings"], {name: file[f"arr_{index}"] for index, name in enumerate(header["names"])}


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

        infos = _with_final_obs(infos, stack_final)
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


class VecMonitor(VecEnvWrapper):
    """Writes one line of CSV per finished episode: return, length, seconds since the start, lane.

    Counted from rewards and flags as this wrapper sees them, so it needs nothing of the env; around a `VecNormalize`
    it would count normalised rewards. The file begins with a comment line of JSON (``t_start``, ``env_id``), then the
    header ``r,l,t,lane``; ``pandas.read_csv(path, comment="#")`` reads it, and so does what reads Stable-Baselines'
    monitor files. Each line is on disk when the step returns. Lanes that are reset before their episode ended, and
    episodes still open at the end, are not written.

    Args:
        venv: The vector env to wrap.
        filename: File to write, or None to only fill ``infos[i]["episode"]`` where the env does not.
        info_keywords: Further keys of the last step's info to write as columns.
        append: Add to the file rather than replace it.

    Raises:
        KeyError: While stepping, if an info at the end of an episode lacks one of `info_keywords`.
    """

    def __init__(
        self,
        venv: VecEnv,
        filename: str | os.PathLike[str] | None = None,
        info_keywords: Sequence[str] = (),
        append: bool = False,
    ) -> None:
        super().__init__(venv)
        self.info_keywords = tuple(info_keywords)
        self._start = time.perf_counter()
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._begun = np.full(self.num_envs, self._start)
        self._ended = np.zeros(self.num_envs, bool)
        self._file: TextIO | None = None
        if filename is not None:
            is_new = not (append and os.path.exists(filename) and os.path.getsize(filename))
            self._file = open(filename, "a" if append else "w", newline="", encoding="utf-8")
            self._writer = csv.writer(self._file)
            if is_new:
                header = {"t_start": time.time(), "env_id": getattr(self.spec, "id", None)}
                self._file.write(f"#{json.dumps(header)}\n")
                self._writer.writerow(["r", "l", "t", "lane", *self.info_keywords])
                self._file.flush()

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset; the counts of the lanes that were reset start anew."""
        result = self.venv.reset(seed=seed, options=options, mask=mask)
        self._begin(self.lane_mask(mask))
        return result

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step and write the episodes that ended with it."""
        observations, rewards, terminated, truncated, infos = self.venv.step_wait(timeout)
        self._returns += rewards
        self._lengths += 1
        if self._mode is AutoresetMode.NEXT_STEP:  # what has ended only reset itself now
            self._begin(self._ended)
        self._ended = terminated | truncated
        lanes = np.flatnonzero(self._ended).tolist()
        for lane in lanes:
            self._end_episode(lane, infos[lane])
        if lanes:
            if self._file is not None:
                self._file.flush()
            if self._mode is AutoresetMode.SAME_STEP:
                self._begin(self._ended)
        return observations, rewards, terminated, truncated, infos

    def close(self, timeout: float = 5.0) -> None:
        """Close the file and the vector env inside."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.venv.close(timeout)

    def _begin(self, lanes: np.ndarray) -> None:
        self._begun[lanes] = time.perf_counter()
        self._returns[lanes], self._lengths[lanes] = 0.0, 0
        self._ended[lanes] = False  # last: `lanes` may be this very array

    def _end_episode(self, lane: int, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        total, length = float(self._returns[lane]), int(self._lengths[lane])
        info.setdefault("episode", {"r": total, "l": length, "t": now - float(self._begun[lane])})
        if self._file is not None:
            more = []
            for key in self.info_keywords:
                if key not in info:
                    raise KeyError(f"VecMonitor: the info of lane {lane} has no {key!r}; it has {sorted(info)}.")
                more.append(info[key])
            self._writer.writerow([round(total, 6), length, round(now - self._start, 6), lane, *more])


class VecCheckNan(VecEnvWrapper):
    """Finds NaN and infinite values in actions, observations and rewards, in the very step where they appear.

    Args:
        venv: The vector env to wrap.
        on_nan: ``"raise"`` (ValueError) or ``"warn"`` (RuntimeWarning).
        warn_once: Whether to warn only about the first one.
        check_inf: Whether infinite values count as well.

    Raises:
        ValueError: For another `on_nan`; while stepping, where a value is not finite: it names what, which lane,
            which part, and the lane's last action.
    """

    def __init__(self, venv: VecEnv, on_nan: str = "raise", warn_once: bool = True, check_inf: bool = True) -> None:
        if on_nan not in ("raise", "warn"):
            raise ValueError(f"on_nan must be 'raise' or 'warn', got {on_nan!r}.")
        super().__init__(venv)
        self.on_nan, self.warn_once, self.check_inf = on_nan, warn_once, check_inf
        self._actions: Any = None
        self._has_warned = False

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset, and check the observations."""
        observations, infos = self.venv.reset(seed=seed, options=options, mask=mask)
        self._actions = None
        self._check("observation", observations)
        return observations, infos

    def step_async(self, actions: Any) -> None:
        """Check the actions, then start the step."""
        self._actions = None
        self._check("action", actions)
        self._actions = actions
        self.venv.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step, and check what it returned."""
        result = self.venv.step_wait(timeout)
        self._check("reward", result[1])
        self._check("observation", result[0])
        for lane, info in enumerate(result[4]):
            if "final_obs" in info:
                self._check("final observation", info["final_obs"], lane)
        return result

    def _check(self, what: str, values: Any, lane: int | None = None) -> None:
        if isinstance(values, list):  # one action per lane
            for index, value in enumerate(values):
                self._check(what, value, index)
            return
        for path, leaf in tree_paths(values):
            if isinstance(leaf, (float, np.floating)) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"):
                rows = np.asarray(leaf) if lane is None else np.asarray(leaf)[None]
                bad = ~np.isfinite(rows) if self.check_inf else np.isnan(rows)
                if bad.any():
                    wrong = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist()
                    self._report(what, path, wrong if lane is None else [lane], rows[wrong[0]])

    def _report(self, what: str, path: str, lanes: list[int], value: Any) -> None:
        if self._has_warned and self.on_nan == "warn" and self.warn_once:
            return
        lane = lanes[0]
        after = ""
        if self._actions is not None:
            given = self._actions
            action = given[lane] if isinstance(given, list) else tree_map(lambda leaf: leaf[lane], given)
            after = f" after action {action!r}"
        message = f"VecCheckNan: {what}{path} of lane {lane} is {value}{after}."
        if len(lanes) > 1:
            message += f" So are lanes {lanes[1:]}."
        if self.on_nan == "raise":
            raise ValueError(message)
        self._has_warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=4)


class VecVideoRecorder(VecEnvWrapper):
    """Films the lanes, tiled into one picture, by means of Gymnasium's ``RecordVideo`` (which needs MoviePy).

    Without triggers, episodes 0, 1, 8, 27, ... 1000, 2000, ... of lane 0 are filmed. Under SAME_STEP the last frame of
    an episode is not in its film: the lane has been reset by then. Close the vector env to finish an open film.

    Args:
        venv: The vector env to wrap, made with ``render_mode="rgb_array"``.
        video_folder: Where the films go: ``<name_prefix>-episode-<n>.mp4`` or ``<name_prefix>-step-<n>.mp4``.
        episode_trigger: ``n -> bool``: whether to film episode n of lane 0.
        step_trigger: ``n -> bool``: whether to begin a film at vector step n.
        video_length: Frames per film; 0: whole episodes of lane 0.
        name_prefix: Begin of the files' names.
        fps: Frames per second; None: as the env's metadata say, else 30.
        record_first_only: Film lane 0 alone.

    Raises:
        ValueError: If the environments do not render images.
        gymnasium.error.DependencyNotInstalled: If MoviePy is missing.
    """

    def __init__(
        self,
        venv: VecEnv,
        video_folder: str | os.PathLike[str],
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "rl-video",
        fps: int | None = None,
        record_first_only: bool = False,
    ) -> None:
        from gymnasium.wrappers.vector import RecordVideo

        super().__init__(venv)
        if venv.render_mode != "rgb_array":
            raise ValueError(
                f"VecVideoRecorder needs environments made with render_mode='rgb_array', got {venv.render_mode!r}: "
                "make_gym_env(..., env_kwargs={'render_mode': 'rgb_array'})."
            )
        self._feed = _Feed(venv)
        with warnings.catch_warnings():
            # Said above: the folder may exist, and the last frame is missing under SAME_STEP.
            warnings.simplefilter("ignore")
            self._recorder: Any = RecordVideo(
                self._feed,
                os.fspath(video_folder),
                record_first_only=record_first_only,
                episode_trigger=episode_trigger,
                step_trigger=step_trigger,
                video_length=video_length,
                name_prefix=name_prefix,
                fps=fps,
            )

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset, and film the first frame of an episode to be filmed."""
        result = self.venv.reset(seed=seed, options=options, mask=mask)
        self._recorder.reset(options=None if mask is None else {"reset_mask": self.lane_mask(mask)})
        return result

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Finish the step, and film it."""
        result = self.venv.step_wait(timeout)
        self._feed.flags = result[2], result[3]
        self._recorder.step(None)
        return result

    def close(self, timeout: float = 5.0) -> None:
        """Finish an open film and close the vector env inside."""
        if not self._feed.closed:
            self._recorder.close()
        self.venv.close(timeout)


class _Feed(VectorEnv):
    """What Gymnasium's recorder sees of a vector env: its flags and its frames. Nothing is stepped twice."""

    def __init__(self, venv: VecEnv) -> None:
        self.venv = venv
        self.num_envs = venv.num_envs
        self.metadata = dict(venv.metadata)
        self.render_mode = venv.render_mode
        self.flags = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return None, {}

    def step(self, actions: Any) -> tuple[Any, Any, np.ndarray, np.ndarray, dict[str, Any]]:
        return None, None, *self.flags, {}

    def render(self) -> tuple[Any, ...]:
        return tuple(self.venv.get_images())


@contextlib.contextmanager
def frozen_statistics(env: Any) -> Iterator[None]:
    """Switch off ``training`` of every vector wrapper around `env` that has it, for as long as the block runs.

    For testing an agent on the env it trains on: `VecNormalize` goes on normalising but learns nothing.

    Args:
        env: Any environment; one without such wrappers is left as it is.
    """
    switched = [layer for layer in _layers(env) if getattr(layer, "__dict__", {}).get("training") is True]
    for layer in switched:
        layer.training = False
    try:
        yield
    finally:
        for layer in switched:
            layer.training = True


def _layers(env: Any) -> Iterator[Any]:
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("venv")


def _with_final_obs(infos: list[dict[str, Any]], change: Callable[[int, Any], Any]) -> list[dict[str, Any]]:
    # New dicts: the vector env inside keeps the old ones for its own next_obs().
    return [
        {**info, "final_obs": change(lane, info["final_obs"])} if "final_obs" in info else info
        for lane, info in enumerate(infos)
    ]


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
