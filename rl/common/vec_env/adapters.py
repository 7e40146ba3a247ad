"""Adapters between `VecEnv` and its neighbours: Gymnasium's vector environments and the older 4-tuple contract."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from rl.common.misc_util import tree_leaves, tree_map, tree_paths
from rl.common.vec_env.arena import Arena, SpaceTree
from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.codec import ActionCodec
from rl.common.vec_env.errors import AlreadySteppingError, ClosedEnvironmentError, NotSteppingError, ResetNeeded

__all__ = ["GymnasiumVecEnv", "LegacyVecEnv", "VecEnvToGymnasium", "from_gymnasium", "to_gymnasium"]


def from_gymnasium(env: VectorEnv) -> VecEnv:
    """See a ``gymnasium.vector.VectorEnv`` as a `VecEnv`.

    The autoreset mode stays the env's own, as told by ``env.metadata["autoreset_mode"]`` (without it: NEXT_STEP,
    Gymnasium's default). EnvPool's Gymnasium class is such an env; it takes its seed at ``envpool.make`` and warns
    that the one given to `reset` is ignored, and where an episode terminates at its very time limit it reports what
    EnvPool calls it: truncated without terminated in releases before 1.2.

    Args:
        env: The vector env; a view on a `VecEnv` made by `to_gymnasium` is unwrapped again. The adapter takes it over:
            closing the one closes the other.

    Returns:
        The adapter, a `GymnasiumVecEnv`.

    Raises:
        TypeError: If `env` is no ``gymnasium.vector.VectorEnv``.
    """
    if isinstance(env, VecEnvToGymnasium):
        return env.venv
    return GymnasiumVecEnv(env)


def to_gymnasium(venv: VecEnv) -> VectorEnv:
    """See a `VecEnv` as a ``gymnasium.vector.VectorEnv``, in the autoreset mode that it has.

    Infos become Gymnasium's dict of arrays; where an episode ended in SAME_STEP mode, ``infos["final_obs"]`` and
    ``infos["final_info"]`` hold the last step's observation and info (with ``episode``), and the other keys belong to
    the reset. ``reset(options={"reset_mask": mask})`` resets some of the lanes.

    Args:
        venv: The vector env; one made by `from_gymnasium` is unwrapped again.

    Returns:
        The adapter, a `VecEnvToGymnasium`.

    Raises:
        TypeError: If `venv` is no `VecEnv`.
    """
    if isinstance(venv, GymnasiumVecEnv):
        return venv.env
    return VecEnvToGymnasium(venv)


class GymnasiumVecEnv(VecEnv):
    """A ``gymnasium.vector.VectorEnv`` under the contract of `VecEnv`; see `from_gymnasium`.

    ``step_async`` runs in the background only where the env itself does so (``AsyncVectorEnv``); elsewhere
    ``step_wait`` does the work. Attributes are those of the single environments where the env has such
    (``SyncVectorEnv``, ``AsyncVectorEnv``), else those of the env itself, which are the same for every lane.

    Args:
        env: The vector env.

    Attributes:
        env: The vector env.
    """

    def __init__(self, env: VectorEnv) -> None:
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"from_gymnasium needs a gymnasium.vector.VectorEnv, got {type(env).__name__}. A single env goes into "
                "make_gym_env or DummyVecEnv, as a function that makes it."
            )
        metadata = dict(env.metadata)
        super().__init__(
            env.num_envs,
            env.single_observation_space,
            env.single_action_space,
            autoreset_mode=metadata.get("autoreset_mode") or AutoresetMode.NEXT_STEP,
            metadata=metadata,
            render_mode=env.render_mode,
            spec=env.spec,
        )
        self.env = env
        self._base: Any = env.unwrapped
        self._mode = self.metadata["autoreset_mode"]
        # Only an unwrapped AsyncVectorEnv can be split into its halves: wrappers do not pass them through.
        self._is_async = isinstance(env, AsyncVectorEnv)
        action_tree = SpaceTree(self.action_space)
        self._codec = ActionCodec(action_tree, [self.action_space])
        self._arena = Arena(SpaceTree(spaces.Tuple(())), action_tree, self.num_envs, 1).allocate()
        self._has_array_obs = all(space.shape is not None for _, space in tree_paths(env.single_observation_space))
        self._pending: Any = None
        self._stepping = False
        self._observations: Any = None
        self._infos: list[dict[str, Any]] | None = None
        self._ended = np.zeros(self.num_envs, bool)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._started = np.zeros(self.num_envs)

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset all lanes, or those of the mask; see `VecEnv.reset`.

        Raises:
            TypeError: For options per lane, which Gymnasium's vector envs do not take.
            ValueError: For seeds that do not count up, on an env with a seed of its own.
            RuntimeError: If the env does not know ``options["reset_mask"]`` and reset all lanes.
        """
        self._check_open()
        lanes = self.lane_mask(mask)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"{self.env} takes one options dict for all lanes, got {type(options).__name__}.")
        seeds = self._next_seeds if seed is None else self.lane_seeds(seed)
        if self._stepping:
            self._drop_step()
        gym_seed = self._gym_seed(seeds)
        if lanes.all():
            observations, infos = self.env.reset(seed=gym_seed, options=options)
        elif self._observations is None:
            raise ResetNeeded("reset(mask=...) resets some of the lanes: call reset() without a mask once before.")
        else:
            if not lanes.any():
                return self._copy(self._observations), [{} for _ in range(self.num_envs)]
            watched = _WatchedOptions(options or {}, reset_mask=lanes.copy())
            observations, infos = self.env.reset(seed=gym_seed, options=watched)
            if not watched.mask_was_read:
                self._observations = None
                raise RuntimeError(
                    f"{self.env} does not know options['reset_mask'] and has reset all lanes: its lanes cannot be "
                    "reset one by one. Call reset() to start afresh, and avoid what cuts single episodes from outside."
                )
        self._next_seeds = None
        if lanes.all():
            rows = _split_infos(infos, self.num_envs)
        else:
            observations, rows = self._merge(observations, infos, lanes)
        self._observations = observations = self._copy(observations)
        self._infos = rows
        self._last_step = None
        self._begin_episodes(lanes)
        return self._copy(observations), rows

    def step_async(self, actions: Any) -> None:
        """Start a step; see `VecEnv.step_async`."""
        self._check_open()
        if self._stepping:
            raise AlreadySteppingError()
        if self._observations is None:
            raise ResetNeeded("Call reset() before the first step.")
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            raise ResetNeeded(
                f"The episodes of lanes {np.flatnonzero(self._ended).tolist()} have ended: call reset(mask=...) first."
            )
        self._pending = self._check_actions(actions)
        if self._is_async:
            self._base.step_async(self._pending)
        self._stepping = True

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Finish the step; see `VecEnv.step_wait`.

        Args:
            timeout: Seconds, for an ``AsyncVectorEnv``; elsewhere the step runs to its end. Gymnasium loses a step
                that timed out: the env has to be reset afterwards.
        """
        self._check_open()
        if not self._stepping:
            raise NotSteppingError()
        self._stepping = False
        result = self._base.step_wait(timeout) if self._is_async else self.env.step(self._pending)
        observations, rewards, terminated, truncated, infos = result
        observations = self._copy(observations)
        rewards = np.array(rewards, np.float64)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        rows = _split_infos(infos, self.num_envs)
        was_reset = self._ended & (self._mode is AutoresetMode.NEXT_STEP)
        self._returns += rewards
        self._lengths += 1
        self._begin_episodes(was_reset)
        for lane in np.flatnonzero(was_reset).tolist():
            rows[lane]["is_reset"] = True
        self._ended = terminated | truncated
        for lane, row in enumerate(rows):
            if self._ended[lane]:
                rows[lane] = self._end_episode(lane, row)
            elif self._mode is AutoresetMode.SAME_STEP:
                row.pop("final_obs", None)  # ALE's vector env fills a dense array of them for all lanes
                row.pop("final_info", None)
        if self._mode is AutoresetMode.SAME_STEP and self._ended.any():
            self._begin_episodes(self._ended)
        self._observations, self._infos = observations, rows
        self._last_step = (observations, rows)
        return self._copy(observations), rewards, terminated, truncated, rows

    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """An attribute of the environments; see `VecEnv.get_attr`."""
        self._check_open()
        lanes = self.lane_indices(indices)
        if isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv)):
            values = self._base.get_attr(name)
            return [values[lane] for lane in lanes]
        value = getattr(self._base, name)
        return [value for _ in lanes]

    def set_attr(self, name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set an attribute of the environments; see `VecEnv.set_attr`."""
        self._check_open()
        lanes = self.lane_indices(indices)
        if not self.has_attr(name):
            raise AttributeError(f"The environments of {self.env} have no attribute {name!r}.")
        everyone = sorted(set(lanes)) == list(range(self.num_envs))
        if isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv)):
            values = [value] * self.num_envs if everyone else list(self._base.get_attr(name))
            for lane in lanes:
                values[lane] = value
            self._base.set_attr(name, values)
        elif everyone:
            setattr(self._base, name, value)
        else:
            raise ValueError(f"{self.env} has one {name!r} for all lanes: it cannot be set for lanes {lanes} alone.")

    def call(self, name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of the environments; see `VecEnv.call`."""
        self._check_open()
        lanes = self.lane_indices(indices)
        if isinstance(self._base, SyncVectorEnv):
            return [self._base.envs[lane].get_wrapper_attr(name)(*args, **kwargs) for lane in lanes]
        if lanes != list(range(self.num_envs)):
            raise ValueError(f"{self.env} calls a method of all lanes at once: lanes {lanes} alone cannot be called.")
        if isinstance(self._base, AsyncVectorEnv):
            return list(self._base.call(name, *args, **kwargs))
        result = getattr(self._base, name)(*args, **kwargs)
        if isinstance(result, (tuple, list)) and len(result) == self.num_envs:
            return list(result)
        return [result] * self.num_envs

    def has_attr(self, name: str) -> bool:
        """Whether every environment has the attribute; see `VecEnv.has_attr`."""
        self._check_open()
        if isinstance(self._base, SyncVectorEnv):
            return all(env.has_wrapper_attr(name) for env in self._base.envs)
        if isinstance(self._base, AsyncVectorEnv):
            return all(self._base.call("has_wrapper_attr", name))
        return hasattr(self._base, name)

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether the environments, or this vector env as a whole, are wrapped in `wrapper_class`.

        Raises:
            NotImplementedError: For the environments of an ``AsyncVectorEnv``, which does not tell.
        """
        self._check_open()
        lanes = self.lane_indices(indices)
        if _has_layer(self.env, wrapper_class):
            return [True for _ in lanes]
        if isinstance(self._base, AsyncVectorEnv):
            raise NotImplementedError("AsyncVectorEnv does not tell which wrappers its environments have.")
        envs = self._base.envs if isinstance(self._base, SyncVectorEnv) else None
        return [envs is not None and _has_layer(envs[lane], wrapper_class) for lane in lanes]

    def action_masks(self) -> np.ndarray | None:
        """Valid actions now, bool (N, n), from the latest ``info["action_mask"]``; None if there is none."""
        rows = [] if self._infos is None else [info.get("reset_info", info) for info in self._infos]
        masks = [info["action_mask"] for info in rows if "action_mask" in info]
        return np.asarray(masks, bool) if rows and len(masks) == len(rows) else None

    def get_images(self) -> list[Any]:
        """The frames of all lanes (None where nothing is rendered)."""
        self._check_open()
        frames: Any = self.env.render()
        return [None] * self.num_envs if frames is None else list(frames)

    def close(self, timeout: float = 5.0) -> None:
        """Close the vector env. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._base, AsyncVectorEnv):
            # Gymnasium's close() waits for ever for a worker that does not answer unless it is given a limit.
            self.env.close(timeout=timeout)
        else:
            self.env.close()

    def _check_open(self) -> None:
        if self._closed or getattr(self.env, "closed", False):
            raise ClosedEnvironmentError(f"{self.env} is closed.")

    def _check_actions(self, actions: Any) -> Any:
        """Check actions as our own vector envs do, and batch them as Gymnasium has it."""
        objects = self._codec.encode(actions, self._arena, slice(0, self.num_envs), self.num_envs)
        if objects is not None:
            out: Any = create_empty_array(self.action_space, self.num_envs)
            return concatenate(self.action_space, objects, out)
        return self._codec.tree.join([self._arena.action[k].copy() for k in self._codec.tree.arrays])

    def _gym_seed(self, seeds: list[int | None] | None) -> Any:
        # An int is what every vector env takes; only Gymnasium's own two take one seed per lane.
        if seeds is None or all(seed is None for seed in seeds):
            return None
        first = seeds[0]
        if first is not None and seeds == [first + lane for lane in range(self.num_envs)]:
            return first
        if isinstance(self._base, (SyncVectorEnv, AsyncVectorEnv)):
            return seeds
        raise ValueError(f"{self.env} takes one int as seed, from which it seeds all lanes; got {seeds}.")

    def _drop_step(self) -> None:
        self._stepping = False
        if self._is_async:
            self._base.step_wait()

    def _merge(self, observations: Any, infos: Any, lanes: np.ndarray) -> tuple[Any, list[dict[str, Any]]]:
        """Put what a partial reset returned into the latest observations; infos of the lanes that were reset."""
        nb_rows = len(tree_leaves(observations)[0]) if self._has_array_obs else len(observations)
        # Gymnasium returns all N rows; EnvPool those of the reset lanes alone, in an order of its own.
        row_of = {lane: lane for lane in range(self.num_envs)}
        if nb_rows != self.num_envs:
            row_of = {int(lane): row for row, lane in enumerate(infos.get("env_id", np.flatnonzero(lanes)))}
        chosen = np.flatnonzero(lanes).tolist()
        source = [row_of[lane] for lane in chosen]
        split = _split_infos(infos, nb_rows)
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for lane in chosen:
            rows[lane] = split[row_of[lane]]
        if not self._has_array_obs:
            merged = list(self._observations)
            for lane in chosen:
                merged[lane] = observations[row_of[lane]]
            return merged, rows

        def merge(old: np.ndarray, new: Any) -> np.ndarray:
            result = old.copy()
            result[chosen] = np.asarray(new)[source]
            return result

        return tree_map(merge, self._observations, observations), rows

    def _copy(self, observations: Any) -> Any:
        if not self._has_array_obs:
            return list(observations)
        return tree_map(_own, observations)

    def _begin_episodes(self, lanes: np.ndarray) -> None:
        self._started[lanes] = time.perf_counter()
        self._returns[lanes], self._lengths[lanes] = 0.0, 0
        self._ended[lanes] = False  # last: `lanes` may be this very array

    def _end_episode(self, lane: int, info: dict[str, Any]) -> dict[str, Any]:
        """Rearrange the info of a lane whose episode ended, as `VecEnv` has it."""
        episode = {
            "r": float(self._returns[lane]),
            "l": int(self._lengths[lane]),
            "t": time.perf_counter() - float(self._started[lane]),
        }
        if self._mode is not AutoresetMode.SAME_STEP:
            return {"episode": episode, **info}
        # The other keys are the reset's. Statistics that a vector wrapper has put beside them are the episode's.
        final_obs, final_info = tree_map(_own, info.pop("final_obs")), info.pop("final_info", {})
        recorded = {"episode": info.pop("episode")} if "episode" in info else {}
        return {"episode": episode, **recorded, **final_info, "final_obs": final_obs, "reset_info": info}


class VecEnvToGymnasium(VectorEnv):
    """A `VecEnv` as a ``gymnasium.vector.VectorEnv``; see `to_gymnasium`.

    Args:
        venv: The vector env.

    Attributes:
        venv: The vector env.
    """

    def __init__(self, venv: VecEnv) -> None:
        if not isinstance(venv, VecEnv):
            raise TypeError(f"to_gymnasium needs a VecEnv, got {type(venv).__name__}.")
        self.venv = venv
        self.num_envs = venv.num_envs
        self.single_observation_space = venv.observation_space
        self.single_action_space = venv.action_space
        self.observation_space = venv.batched_observation_space
        self.action_space = venv.batched_action_space
        self.metadata = dict(venv.metadata)
        self.render_mode = venv.render_mode
        self.spec = venv.spec
        self._mode = self.metadata["autoreset_mode"]

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all lanes, or those of ``options["reset_mask"]``.

        Args:
            seed: An int (lane i gets ``seed + i``) or one seed per lane.
            options: Options for every env; ``reset_mask``, a bool array (N,), is taken out.

        Returns:
            Observations (N, *obs) and a dict of arrays.
        """
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
        observations, infos = self.venv.reset(seed=seed, options=options or None, mask=mask)
        return self._batched(observations), self._join(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all lanes.

        Args:
            actions: One of `action_space`.

        Returns:
            Observations (N, *obs), rewards, terminations and truncations (N,), and a dict of arrays.
        """
        observations, rewards, terminated, truncated, infos = self.venv.step(actions)
        if self._mode is AutoresetMode.SAME_STEP:
            infos = [_gymnasium_info(info) if "final_obs" in info else info for info in infos]
        return self._batched(observations), rewards, terminated, truncated, self._join(infos)

    def render(self) -> tuple[Any, ...]:
        """The frames of all lanes."""
        return tuple(self.venv.get_images())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute that is none."""
        values = self.venv.get_attr(name) if not (args or kwargs) else None
        if values is not None and not callable(values[0]):
            return tuple(values)
        return tuple(self.venv.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return tuple(self.venv.get_attr(name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: a list or tuple holds one value each, else all get the same."""
        if not isinstance(values, (list, tuple)):
            return self.venv.set_attr(name, values)
        if len(values) != self.num_envs:
            raise ValueError(f"Expected {self.num_envs} values, one per environment, got {len(values)}.")
        for lane, value in enumerate(values):
            self.venv.set_attr(name, value, indices=lane)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments; ``timeout`` in seconds is passed on."""
        self.venv.close(**({} if kwargs.get("timeout") is None else {"timeout": kwargs["timeout"]}))

    def _batched(self, observations: Any) -> Any:
        # What is no array comes as a list from a VecEnv and as a tuple from Gymnasium.
        return tuple(observations) if isinstance(observations, list) else observations

    def _join(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for lane, info in enumerate(infos):
            if info:
                joined = self._add_info(joined, info, lane)
        return joined


class LegacyVecEnv:
    """The 4-tuple view of a `VecEnv` for code written for keras-rl, Baselines or Stable-Baselines.

    ``reset() -> observations``, ``step(actions) -> (observations, rewards, dones, infos)``; where an episode ended,
    ``infos[i]["terminal_observation"]`` is its last observation and ``infos[i]["TimeLimit.truncated"]`` tells whether
    it was cut rather than terminated. Everything else is the vector env's own.

    Args:
        venv: A `VecEnv` in SAME_STEP mode, the only one that the old contract knows.

    Attributes:
        venv: The vector env.

    Raises:
        TypeError: If `venv` is no `VecEnv`.
        ValueError: If it is in another autoreset mode.
    """

    def __init__(self, venv: VecEnv) -> None:
        if not isinstance(venv, VecEnv):
            raise TypeError(f"LegacyVecEnv needs a VecEnv, got {type(venv).__name__}.")
        if venv.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"LegacyVecEnv needs autoreset mode SAME_STEP, got {venv.metadata['autoreset_mode'].name}: in the old "
                "contract a lane that has ended returns the first observation of its next episode."
            )
        self.venv = venv

    def reset(self) -> Any:
        """Reset all lanes and return their observations, (N, *obs)."""
        return self.venv.reset()[0]

    def step_async(self, actions: Any) -> None:
        """Start a step with N actions."""
        self.venv.step_async(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Finish the step: observations (N, *obs), rewards (N,) float64, dones (N,) bool, N infos."""
        observations, rewards, terminated, truncated, infos = self.venv.step_wait()
        dones = terminated | truncated
        infos = list(infos)
        for lane in np.flatnonzero(dones):
            infos[lane] = {
                **infos[lane],
                "terminal_observation": infos[lane]["final_obs"],
                "TimeLimit.truncated": bool(truncated[lane] and not terminated[lane]),
            }
        return observations, rewards, dones, infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """`step_async` and `step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def close(self) -> None:
        """Close the environments."""
        self.venv.close()

    def __getattr__(self, name: str) -> Any:
        if name == "venv" or name.startswith("__"):  # not set yet, or asked for by copy and pickle
            raise AttributeError(name)
        return getattr(self.venv, name)

    def __len__(self) -> int:
        return self.venv.num_envs

    def __repr__(self) -> str:
        return f"LegacyVecEnv({self.venv!r})"


class _WatchedOptions(dict[str, Any]):
    """Reset options that notice whether anybody asked for the mask.

    An env that does not know the key resets every lane without a word; this makes it visible.
    """

    def __init__(self, options: dict[str, Any], reset_mask: np.ndarray) -> None:
        super().__init__(options, reset_mask=reset_mask)
        self.mask_was_read = False

    def _note(self, key: Any) -> None:
        self.mask_was_read = self.mask_was_read or key == "reset_mask"

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)


def _own(leaf: Any) -> Any:
    # Envs may go on writing into what they returned. What is no array (text, graphs) is left as it is.
    return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "__array__") else leaf


def _split_infos(infos: Any, nb_envs: int) -> list[dict[str, Any]]:
    """Turn a dict of arrays, with masks under ``_key``, into one dict per lane."""
    rows: list[dict[str, Any]] = [{} for _ in range(nb_envs)]
    if isinstance(infos, (list, tuple)):  # DictInfoToList has been here
        return [dict(info) for info in infos]
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        parts: Any = _split_infos(value, nb_envs) if isinstance(value, dict) else value
        if not hasattr(parts, "__len__") or isinstance(parts, str) or len(parts) != nb_envs:
            parts = [value] * nb_envs  # one value for all
        for lane in range(nb_envs) if mask is None else np.flatnonzero(mask):
            part = parts[lane]
            if mask is None and part is None:
                continue
            rows[lane][key] = part
    return rows


def _gymnasium_info(info: dict[str, Any]) -> dict[str, Any]:
    """The info of an ended lane as Gymnasium arranges it in SAME_STEP mode."""
    final_info = {key: value for key, value in info.items() if key not in ("final_obs", "reset_info")}
    return {**info.get("reset_info", {}), "final_obs": info["final_obs"], "final_info": final_info}


def _has_layer(env: Any, wrapper_class: type) -> bool:
    while True:
        if isinstance(env, wrapper_class):
            return True
        inner = getattr(env, "env", None)
        if inner is None:
            return False
        env = inner
