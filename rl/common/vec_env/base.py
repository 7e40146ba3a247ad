"""The contract of a vector environment: N independent copies of an environment behind one interface."""

from __future__ import annotations

import abc
import copy
import operator
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl.common.vec_env.errors import ClosedEnvironmentError

__all__ = ["CloudpickleWrapper", "VecEnv", "successors"]

MAX_SEED = 2**32 - 1


class CloudpickleWrapper:
    """Makes closures, lambdas and classes of `__main__` picklable by means of cloudpickle.

    Args:
        x: Any object; available as the attribute `x`.
    """

    def __init__(self, x: Any) -> None:
        """Wrap `x`."""
        self.x = x

    def __getstate__(self) -> bytes:
        """Serialise by value."""
        return cloudpickle.dumps(self.x)

    def __setstate__(self, state: bytes) -> None:
        """Restore what `__getstate__` wrote."""
        self.x = pickle.loads(state)


def successors(observations: Any, infos: Sequence[dict[str, Any]]) -> Any:
    """The observations that truly followed the last actions.

    Args:
        observations: `(N, *obs)` tree returned by a step.
        infos: The N infos of the same step.

    Returns:
        `observations` itself if no info holds `final_obs`, else a copy in which the rows of the lanes that ended
        and were reset within the step hold their `final_obs`.
    """
    ended = [i for i, info in enumerate(infos) if "final_obs" in info]
    if not ended:
        return observations
    return _replace_rows(observations, ended, [infos[i]["final_obs"] for i in ended])


def _replace_rows(batch: Any, rows: list[int], values: list[Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _replace_rows(leaf, rows, [value[key] for value in values]) for key, leaf in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_replace_rows(leaf, rows, [value[k] for value in values]) for k, leaf in enumerate(batch))
    batch = batch.copy()
    for row, value in zip(rows, values, strict=True):
        batch[row] = value
    return batch


class VecEnv(abc.ABC):
    """N environments ("lanes") that are reset and stepped together.

    Observations come as `(N, *obs)` arrays in the space's dtype: `Dict` and `Tuple` spaces as dicts and tuples of
    such arrays, `Discrete` as int64 `(N,)`; leaves that are no arrays (`Text`, `Graph`, ...) as lists of N objects.
    Infos are a list of N dicts.

    What happens when an episode ends is told by `metadata["autoreset_mode"]`:

    * `SAME_STEP` (default): the lane is reset within the same step. `obs[i]` is the first observation of the next
      episode; `infos[i]` is the terminal step's info plus `final_obs` (the true last observation), `reset_info`
      and `episode` (`{"r": return, "l": length, "t": seconds}`).
    * `NEXT_STEP`: the terminal observation is returned; the next step ignores that lane's action, resets it and
      returns reward 0, both flags False and `infos[i]["is_reset"] = True`. Such a row is no transition.
    * `DISABLED`: a finished lane must be reset with `reset(mask=...)` before the next step.

    `terminated` and `truncated` are kept apart; both may be True, which counts as terminated.

    Args:
        num_envs: N, the number of environments.
        observation_space: Space of ONE environment.
        action_space: Space of ONE environment. It is copied, as an environment may sample its own.
        autoreset_mode: What happens at the end of an episode.
        metadata: Further entries for `metadata`.
        render_mode: The environments' render mode.
        spec: The environments' `EnvSpec`.
    """

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
        spec: Any = None,
    ) -> None:
        """Store the description of the environments."""
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = _own_space(action_space)
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.metadata["autoreset_mode"] = AutoresetMode(autoreset_mode)
        self.render_mode = render_mode
        self.spec = spec
        self._closed = False
        self._next_seeds: list[int | None] | None = None
        self._last_step: tuple[Any, Sequence[dict[str, Any]]] | None = None

    # What a vector environment must provide.

    @abc.abstractmethod
    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all lanes, or those of the mask; the other lanes stay as they are, in every autoreset mode.

        A pending step is waited for and dropped first.

        Args:
            seed: An int gives lane i the seed `seed + i`; a sequence holds one seed (or None) per lane. Without one,
                the seeds stored by `seed()` are used, once; without those the lanes go on with their generators.
            options: One dict for all lanes, or a sequence with one dict (or None) per lane.
            mask: Boolean `(N,)`: the lanes to reset. Default: all.

        Returns:
            `(observations, infos)` for all lanes: rows outside the mask hold the lane's latest observation
            and an empty info.
        """

    @abc.abstractmethod
    def step_async(self, actions: Any) -> None:
        """Start a step of all lanes without waiting for it.

        Args:
            actions: `(N, *action)` array, or a sequence of N actions; for `Dict` spaces a dict of such arrays or a
                list of N dicts; for `Tuple` spaces a tuple of such arrays or a list of N tuples.
        """

    @abc.abstractmethod
    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Wait for the step started by `step_async`.

        Args:
            timeout: Seconds to wait at most. After a `WorkerTimeoutError` the step is still pending: call again.

        Returns:
            `(observations, rewards, terminated, truncated, infos)`: a `(N, *obs)` tree, float64 `(N,)`,
            bool `(N,)`, bool `(N,)`, a list of N dicts.
        """

    @abc.abstractmethod
    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """The attribute `name` of the environments, found through their wrappers.

        Args:
            name: Attribute name; an environment without it raises AttributeError.
            indices: Lanes to ask. Default: all.
        """

    @abc.abstractmethod
    def set_attr(self, name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set the attribute `name` to `value` on the wrapper (or environment) that owns it.

        Args:
            name: Attribute name.
            value: The same value for every lane.
            indices: Lanes to change. Default: all.
        """

    @abc.abstractmethod
    def call(self, name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call the method `name` of the environments.

        Args:
            name: Method name, found through the wrappers.
            *args: Positional arguments, the same for every lane.
            indices: Lanes to call. Default: all.
            **kwargs: Keyword arguments, the same for every lane.

        Returns:
            The results, in the order of the indices.
        """

    @abc.abstractmethod
    def has_attr(self, name: str) -> bool:
        """Whether every environment has the attribute `name`."""

    @abc.abstractmethod
    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether the environments are wrapped in `wrapper_class`.

        Args:
            wrapper_class: A wrapper class.
            indices: Lanes to ask. Default: all.
        """

    @abc.abstractmethod
    def action_masks(self) -> np.ndarray | None:
        """Valid actions now, bool `(N, n)`, or None if no environment tells.

        Taken from `info["action_mask"]` of the latest reset or step, else from the method `action_masks()`.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Close the environments. A second call does nothing.

        Args:
            timeout: Seconds after which what does not end by itself is ended by force.
        """

    # What follows from it.

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all lanes: `step_async(actions)` and `step_wait()`."""
        self.step_async(actions)
        return self.step_wait()

    def next_obs(self) -> Any:
        """The true successors of the last step, `(N, *obs)`: final observations where an episode ended.

        Where no lane was reset within the step these are the very arrays that the step returned.

        Raises:
            RuntimeError: If no step has been taken since the last reset.
        """
        if self._last_step is None:
            raise RuntimeError("next_obs() needs a step: none was taken since the last reset().")
        return successors(*self._last_step)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[int | None]:
        """Store seeds for the next `reset()`, which uses them once; nothing is reset now.

        Args:
            seed: An int (lane i gets `seed + i`), one seed per lane, or None to forget what is stored.

        Returns:
            The lanes' seeds.
        """
        seeds = self.lane_seeds(seed)
        self._next_seeds = None if seed is None else seeds
        return seeds

    def lane_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """One seed per lane: `seed + i` for an int, else the sequence itself, checked.

        Args:
            seed: An int, a sequence of N ints or Nones, or None.

        Raises:
            ValueError: If a seed lies outside 0..2**32 - 1 or their number is not N.
        """
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)) or (isinstance(seed, np.ndarray) and seed.ndim == 0):
            seeds: list[Any] = [operator.index(seed) + i for i in range(self.num_envs)]
        else:
            try:
                # Gymnasium refuses NumPy integers, so plain ints leave here.
                seeds = [None if one is None else operator.index(one) for one in seed]
            except TypeError as error:
                raise ValueError(
                    f"seed must be an int, a sequence of {self.num_envs} ints or None, got {seed!r}."
                ) from error
        if len(seeds) != self.num_envs:
            raise ValueError(f"Expected {self.num_envs} seeds, one per environment, got {len(seeds)}.")
        for one in seeds:
            if one is not None and not 0 <= one <= MAX_SEED:
                raise ValueError(f"A seed must lie in 0..2**32 - 1 (lane i gets seed + i), got {one}.")
        return seeds

    def get_images(self) -> list[Any]:
        """The environments' `render()` results, one per lane (None where nothing is rendered)."""
        return self.call("render")

    def render(self, mode: str | None = None) -> Any:
        """All lanes in one picture.

        Args:
            mode: Must be the environments' `render_mode` if given: Gymnasium fixes it when an env is made.

        Returns:
            A `(H, W, C)` uint8 image with the lanes as tiles, a string for text modes, or None if the
            environments render nothing or draw their own windows.
        """
        if mode is not None and mode != self.render_mode:
            raise ValueError(
                f"The environments were made with render_mode={self.render_mode!r}, got mode={mode!r}. "
                "Choose the mode when the environments are made."
            )
        if self.render_mode is None:
            return None
        images = [image for image in self.get_images() if image is not None]
        if not images:
            return None
        if isinstance(images[0], str):
            return "\n\n".join(images)
        if isinstance(images[0], list):  # "rgb_array_list": the latest frame of each
            images = [frames[-1] for frames in images if frames]
            if not images:
                return None
        from rl.common.tile_images import tile_images

        return tile_images(np.stack(images))

    def send(self, actions: Any, env_ids: Iterable[int] | None = None) -> None:
        """Start a step of some lanes only; see `SubprocVecEnv.send`."""
        raise NotImplementedError(f"{type(self).__name__} steps all lanes at once: use step_async() and step_wait().")

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for some of the lanes that were sent; see `SubprocVecEnv.recv`."""
        raise NotImplementedError(f"{type(self).__name__} steps all lanes at once: use step_async() and step_wait().")

    def split(self, k: int) -> list[VecEnv]:
        """Make k views over disjoint blocks of lanes, each a vector env with its own steps."""
        raise NotImplementedError(f"{type(self).__name__} cannot be split: split the vector env that it wraps.")

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """The space of one observation, as `observation_space`."""
        return self.observation_space

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """The space of one action, as `action_space`."""
        return self.action_space

    @property
    def batched_observation_space(self) -> gymnasium.Space[Any]:
        """The space of N observations, as `gymnasium.vector.VectorEnv.observation_space`."""
        return batch_space(self.observation_space, self.num_envs)

    @property
    def batched_action_space(self) -> gymnasium.Space[Any]:
        """The space of N actions, as `gymnasium.vector.VectorEnv.action_space`."""
        return batch_space(self.action_space, self.num_envs)

    @property
    def unwrapped(self) -> VecEnv:
        """The vector env below all wrappers."""
        return self

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def lane_indices(self, indices: int | Iterable[int] | None) -> list[int]:
        """Lane numbers as a checked list; negative ones count from the end.

        Args:
            indices: An int, several ints, or None for all lanes.

        Raises:
            IndexError: If a lane does not exist.
        """
        if indices is None:
            return list(range(self.num_envs))
        wanted = [indices] if isinstance(indices, (int, np.integer)) else list(indices)
        lanes = [operator.index(one) for one in wanted]
        for lane in lanes:
            if not -self.num_envs <= lane < self.num_envs:
                raise IndexError(f"There is no environment {lane}: they are numbered 0..{self.num_envs - 1}.")
        return [lane % self.num_envs for lane in lanes]

    def lane_mask(self, mask: Any) -> np.ndarray:
        """A mask over the lanes as bool `(N,)`; None means all.

        Args:
            mask: Boolean `(N,)` or None.

        Raises:
            ValueError: If it is no boolean `(N,)`.
        """
        if mask is None:
            return np.ones(self.num_envs, dtype=bool)
        array = np.asarray(mask)
        if array.dtype != bool or array.shape != (self.num_envs,):
            raise ValueError(
                f"mask must be a boolean array of shape ({self.num_envs},), got shape {array.shape}, {array.dtype}."
            )
        return array

    def __len__(self) -> int:
        """N, the number of environments."""
        return self.num_envs

    def __enter__(self) -> VecEnv:
        """Enter a `with` block that closes the environments at its end."""
        if self.closed:
            raise ClosedEnvironmentError(f"This {type(self).__name__} is closed.")
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Close the environments."""
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or copied: the environments cannot travel along."""
        raise TypeError(f"A {type(self).__name__} cannot be pickled or copied. Pass a function that makes one instead.")

    def __repr__(self) -> str:
        """Class, number of lanes and spaces."""
        return f"<{type(self).__name__} of {self.num_envs} environments, {self.observation_space}, {self.action_space}>"


def _own_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """A copy with a random stream of its own: who samples it must not disturb an environment in this process."""
    own = copy.deepcopy(space)
    if isinstance(own, Discrete):
        own.n = int(own.n)  # type: ignore[assignment] # Keras refuses NumPy's in `Dense(env.action_space.n)`
    return own
