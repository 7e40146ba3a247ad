"""Vectorised environments in one call: `make_gym_env`, and the preprocessing that it applies to each environment."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from rl.common.misc_util import MAX_SEED
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from rl.common.vec_env.adapters import from_gymnasium
from rl.common.vec_env.cores import choose_workers, probe_env, usable_cores

__all__ = ["WRAPPER_KEYS", "make_gym_env", "wrap_env"]


def make_gym_env(
    env_id: str | EnvSpec | Callable[..., gym.Env],
    num_env: int | str = 2,
    seed: int | None = 123,
    wrapper_kwargs: Mapping[str, Any] | None = None,
    start_index: int = 0,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrapper_class: Callable[..., gym.Env] | None = None,
    wrapper_class_kwargs: Mapping[str, Any] | None = None,
    vec_env_cls: Callable[..., VecEnv] | str | None = None,
    workers: int | str | None = None,
    verbose: int = 1,
    **vec_env_kwargs: Any,
) -> VecEnv:
    """Make `num_env` copies of an environment that step together.

    Environment i is built by ``gymnasium.make(env_id, **env_kwargs)``, wrapped as `wrapper_kwargs` says (see
    `wrap_env` for keys and order), then in `wrapper_class`; it is seeded with ``seed + start_index + i``. By default
    the environments run in a `SubprocVecEnv`, one worker process per usable core; they are built in the workers and
    never in this process. Gymnasium's passive checker is off (the vector environment checks every observation
    itself); ``env_kwargs={"disable_env_checker": False}`` turns it on.

    Args:
        env_id: A registered id (``"CartPole-v1"``, also ``"module:id"``), a ``gymnasium.envs.registration.EnvSpec``,
            or a class or other callable that returns a new environment each time it is called. An id that was
            registered only in this process works: its spec is sent to the workers.
        num_env: Number of environments, or ``"auto"``: four per usable core, at least 8 and at most 64. One forward
            pass serves them all, so more environments make acting cheaper until memory or simulation is the limit.
        seed: Base seed, a non-negative integer; it makes the first ``reset()`` without arguments, all later
            episodes, and every action space reproducible. None: fresh entropy, all environments different.
        wrapper_kwargs: Preprocessing of observations and rewards, see `wrap_env`.
        start_index: Added to every seed. Give each of several learner processes its own range:
            ``start_index=rank * num_env``.
        env_kwargs: Arguments of ``gymnasium.make``, or of the callable given as `env_id`.
        wrapper_class: Applied last: ``wrapper_class(env, **wrapper_class_kwargs)``.
        wrapper_class_kwargs: Arguments of `wrapper_class`.
        vec_env_cls: None or ``SubprocVecEnv`` (processes), ``DummyVecEnv`` (a loop in this process), a class of your
            own that takes a list of functions, or ``"native"``: the environment's own vectorised implementation
            (``gymnasium.make_vec(..., vectorization_mode="vector_entry_point")``), which is one object and so takes
            none of `wrapper_class`, `workers` and most of `wrapper_kwargs`.
        workers: None: as many processes as the class chooses (one per usable core). A number: so many. ``"auto"``:
            times some steps of one environment in a worker process, then takes one worker per usable core where
            stepping computes, one per environment where it waits (a simulator, a network), and a `DummyVecEnv`
            where it costs less than talking to processes would.
        verbose: 1 prints what ``"auto"`` chose and why, 0 is silent.
        **vec_env_kwargs: Further arguments of the vector environment's class, e.g. ``autoreset_mode``,
            ``start_method``, ``on_worker_failure``.

    Returns:
        A `VecEnv` of `num_env` environments.

    Raises:
        TypeError: For an unknown key of `wrapper_kwargs`, an environment instance in place of a function, or an
            argument that the chosen class does not take.
        ValueError: For a number of environments below 1, or seeds outside 0 to 2**32 - 1.
        gymnasium.error.Error: For an id that nobody registered.
    """
    nb_envs = _check_num_env(num_env)
    _check_seed(seed, start_index, nb_envs)
    checked_wrapper_kwargs = _check_wrapper_kwargs(wrapper_kwargs)
    if wrapper_class is None and wrapper_class_kwargs:
        raise TypeError("wrapper_class_kwargs was given without wrapper_class: there is no class to take it.")
    if wrapper_class is not None and not callable(wrapper_class):
        raise TypeError(f"wrapper_class must be a class or function that takes an env, got {wrapper_class!r}.")
    if {"num_envs", "n_envs"} & vec_env_kwargs.keys():
        raise TypeError("make_gym_env() calls the number of environments num_env, as keras-rl did.")
    maker, module = _resolve_env(env_id)
    env_kwargs = dict(env_kwargs or {})
    if "time_limit" in checked_wrapper_kwargs and "max_episode_steps" in env_kwargs and isinstance(maker, EnvSpec):
        raise TypeError(
            "wrapper_kwargs['time_limit'] and env_kwargs['max_episode_steps'] say the same: give one of them."
        )
    if num_env == "auto" and verbose:
        print(f"make_gym_env: num_env='auto' makes {nb_envs} environments on {usable_cores()} usable cores.")

    if vec_env_cls == "native":
        if wrapper_class is not None or workers is not None or vec_env_kwargs:
            raise TypeError(
                "vec_env_cls='native' is one object in this process: it takes no wrapper_class, workers or "
                f"{sorted(vec_env_kwargs) or 'further arguments'}. Put the env's own arguments into env_kwargs, or "
                "leave vec_env_cls out."
            )
        venv = _make_native(maker, nb_envs, env_kwargs, checked_wrapper_kwargs)
    else:
        if isinstance(vec_env_cls, str) or not (vec_env_cls is None or callable(vec_env_cls)):
            raise TypeError(
                f"vec_env_cls must be None, a class such as SubprocVecEnv or DummyVecEnv, or 'native', got "
                f"{vec_env_cls!r}."
            )
        env_fns: list[Callable[[], gym.Env]] = [
            _EnvFunction(
                maker=maker,
                module=module,
                env_kwargs=env_kwargs,
                wrapper_kwargs=checked_wrapper_kwargs,
                wrapper_class=wrapper_class,
                wrapper_class_kwargs=dict(wrapper_class_kwargs or {}),
                seed=None if seed is None else int(seed) + int(start_index) + index,
            )
            for index in range(nb_envs)
        ]
        venv = _make_vec_env(env_fns, vec_env_cls, workers, verbose, vec_env_kwargs)
    if seed is not None:
        venv.seed(int(seed) + int(start_index))
        venv.action_space.seed(int(seed) + int(start_index))
    return venv


def wrap_env(env: gym.Env, wrapper_kwargs: Mapping[str, Any] | None = None) -> gym.Env:
    """Wrap one environment in the preprocessing that `make_gym_env` applies, for a single evaluation env say.

    The keys, in the order in which they are applied whatever the order of the dict; each is one of Gymnasium's own
    wrappers. None and False mean off.

    ==================================  =========================================================================
    key                                 meaning
    ==================================  =========================================================================
    ``time_limit=n``                    truncate after n steps of the env itself (``TimeLimit``); in
                                        `make_gym_env` it replaces the limit registered with the id
    ``atari=True``                      ``AtariPreprocessing``: up to 30 no-ops, every 4th frame, maximum over two,
                                        grey, 84x84; or a dict of that wrapper's arguments. `action_repeat`,
                                        `grayscale` and `resize` set the respective argument of it. In
                                        `make_gym_env` the env's own frame skip is turned off
    ``action_repeat=k``                 each action k times, rewards summed (``RepeatAction``)
    ``episode_statistics=True``         ``RecordEpisodeStatistics``: return and length in ``info["episode"]``, of
                                        the rewards before the changes below
    ``grayscale=True``                  colour image (H, W, 3) to (H, W) (``GrayscaleObservation``)
    ``resize=(h, w)``                   image to (h, w) (``ResizeObservation``)
    ``flatten=True``                    any space to a vector (``FlattenObservation``)
    ``normalize_observation=True``      running mean 0, variance 1 (``NormalizeObservation``)
    ``clip_observation=(lo, hi)``       (``TransformObservation``)
    ``frame_stack=k``                   the last k observations along a new first axis (``FrameStackObservation``)
    ``normalize_reward=True``           running variance of the return 1 (``NormalizeReward``)
    ``scale_reward=c``                  reward times c (``TransformReward``)
    ``clip_reward=(lo, hi)``            (``ClipReward``); last, so its bounds hold
    ==================================  =========================================================================

    `normalize_observation` and `normalize_reward` keep one set of statistics per environment, which nobody saves;
    `rl.common.vec_env.VecNormalize` keeps one for all.

    Args:
        env: The environment to wrap.
        wrapper_kwargs: The keys above.

    Returns:
        The wrapped environment; `env` itself where there is nothing to do.

    Raises:
        TypeError: For an unknown key, or a value of the wrong type.
        ValueError: For a value out of range.
    """
    given = _check_wrapper_kwargs(wrapper_kwargs)
    if "time_limit" in given:
        env = wrappers.TimeLimit(env, given["time_limit"])
    if "atari" in given:
        env = wrappers.AtariPreprocessing(env, **given["atari"])
    if "action_repeat" in given:
        if not hasattr(wrappers, "RepeatAction"):
            raise ImportError("wrapper_kwargs['action_repeat'] needs Gymnasium 1.3 or later (RepeatAction).")
        env = wrappers.RepeatAction(env, given["action_repeat"])
    if "episode_statistics" in given:
        env = wrappers.RecordEpisodeStatistics(env)
    if "grayscale" in given:
        env = wrappers.GrayscaleObservation(env)
    if "resize" in given:
        env = wrappers.ResizeObservation(env, given["resize"])
    if "flatten" in given:
        env = wrappers.FlattenObservation(env)
    if "normalize_observation" in given:
        env = wrappers.NormalizeObservation(env)
    if "clip_observation" in given:
        env = _clip_observation(env, *given["clip_observation"])
    if "frame_stack" in given:
        env = wrappers.FrameStackObservation(env, given["frame_stack"])
    if "normalize_reward" in given:
        env = wrappers.NormalizeReward(env)
    if "scale_reward" in given:
        env = wrappers.TransformReward(env, _Scale(given["scale_reward"]))
    if "clip_reward" in given:
        env = wrappers.ClipReward(env, *given["clip_reward"])
    return env


# --- one environment -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _EnvFunction:
    """Builds one environment, in whatever process it is called; travels there by cloudpickle."""

    maker: EnvSpec | Callable[..., gym.Env]
    module: str | None
    env_kwargs: dict[str, Any]
    wrapper_kwargs: dict[str, Any]
    wrapper_class: Callable[..., gym.Env] | None
    wrapper_class_kwargs: dict[str, Any]
    seed: int | None

    def __call__(self) -> gym.Env:
        if self.module is not None:  # "module:id": what else the module registers or sets up belongs to the env
            importlib.import_module(self.module)
        todo = dict(self.wrapper_kwargs)
        kwargs = dict(self.env_kwargs)
        if isinstance(self.maker, EnvSpec):
            if "atari" in todo:
                kwargs.setdefault("frameskip", 1)
            if "time_limit" in todo:
                kwargs["max_episode_steps"] = todo.pop("time_limit")
            env = gym.make(self.maker, **{"disable_env_checker": True, **kwargs})
        else:
            env = self.maker(**kwargs)
        env = wrap_env(env, todo)
        if self.wrapper_class is not None:
            env = self.wrapper_class(env, **self.wrapper_class_kwargs)
        if self.seed is not None:
            env.action_space.seed(self.seed)
        return env


class _Scale:
    # A class, not a lambda: a wrapped env stays picklable and says in its repr what it does.
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, reward: Any) -> float:
        return float(reward) * self.factor


class _Clip:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        return np.clip(observation, self.low, self.high).astype(observation.dtype, copy=False)


def _clip_observation(env: gym.Env, low: float, high: float) -> gym.Env:
    space = env.observation_space
    if not isinstance(space, spaces.Box):
        raise TypeError(
            f"wrapper_kwargs['clip_observation'] needs a Box observation space, got {space}. Add flatten=True, or "
            "use a wrapper_class."
        )
    clip = _Clip(low, high)
    clipped = spaces.Box(clip(space.low), clip(space.high), dtype=space.dtype.type)
    return wrappers.TransformObservation(env, clip, clipped)


def _resolve_env(env_id: Any) -> tuple[EnvSpec | Callable[..., gym.Env], str | None]:
    """Find here what the workers will build, so that a wrong id is reported before any process starts."""
    if isinstance(env_id, (gym.Env, gym.vector.VectorEnv, VecEnv)):
        raise TypeError(
            f"make_gym_env needs an id, a class or a function that makes an env, got the instance {env_id}: every "
            "process must build its own. Pass the class, or a function that returns a new env."
        )
    module = None
    if isinstance(env_id, str):
        module, _, name = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        elif name.startswith("ALE/") and name not in registration.registry:
            # ale-py registers its ids when it is imported, which users of an id alone do not think of.
            try:
                gym.register_envs(importlib.import_module("ale_py"))
            except ImportError as error:
                raise gym.error.NamespaceNotFound(
                    f"{name} is an env of the package ale-py, which is not installed: pip install 'keras-rl3[atari]'."
                ) from error
        spec = registration.registry.get(name) or _find_latest(name)
    elif isinstance(env_id, EnvSpec):
        spec = env_id
    elif callable(env_id):
        return env_id, None
    else:
        raise TypeError(f"env_id must be an id, an EnvSpec, a class or a function, got {env_id!r}.")
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        # Workers do not import the user's main module: send the object, not its name.
        creator: Any = registration.load_env_creator(spec.entry_point)
        spec = dataclasses.replace(spec, entry_point=creator)
    return spec, module or None


def _find_latest(name: str) -> EnvSpec:
    namespace, bare_name, version = registration.parse_env_id(name)
    if version is None and (latest := registration.find_highest_version(namespace, bare_name)) is not None:
        name = registration.get_env_id(namespace, bare_name, latest)
    return gym.spec(name)  # raises Gymnasium's own error, which suggests similar ids


# --- checks of arguments ---------------------------------------------------------------------------------------------


def _check_num_env(num_env: Any) -> int:
    if isinstance(num_env, str) and num_env == "auto":
        return min(64, max(8, 4 * usable_cores()))
    if isinstance(num_env, bool) or not isinstance(num_env, (int, np.integer)):
        raise TypeError(f"num_env must be an integer or 'auto', got {num_env!r}.")
    if num_env < 1:
        raise ValueError(f"num_env must be at least 1, got {num_env}.")
    return int(num_env)


def _check_seed(seed: Any, start_index: Any, nb_envs: int) -> None:
    for name, value in (("seed", seed), ("start_index", start_index)):
        if value is None and name == "seed":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer{' or None' if name == 'seed' else ''}, got {value!r}.")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")
    if seed is not None and int(seed) + int(start_index) + nb_envs - 1 > MAX_SEED:
        raise ValueError(
            f"seed + start_index + num_env - 1 must not exceed {MAX_SEED}, got seed={seed}, "
            f"start_index={start_index}, num_env={nb_envs}."
        )


def _flag(key: str, value: Any) -> bool | None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"wrapper_kwargs[{key!r}] must be True or False, got {value!r}.")
    return True if value else None


def _count(key: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"wrapper_kwargs[{key!r}] must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"wrapper_kwargs[{key!r}] must be at least 1, got {value}.")
    return int(value)


def _factor(key: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"wrapper_kwargs[{key!r}] must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"wrapper_kwargs[{key!r}] must be finite, got {value}.")
    return float(value)


def _pair(key: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"wrapper_kwargs[{key!r}] must be a pair, got {value!r}.")
    return value[0], value[1]


def _size(key: str, value: Any) -> tuple[int, int]:
    height, width = _pair(key, value)
    return _count(key, height), _count(key, width)


def _bounds(key: str, value: Any) -> tuple[float, float]:
    low, high = (float(bound) for bound in _pair(key, value))
    if not low < high:
        raise ValueError(f"wrapper_kwargs[{key!r}] must be (low, high) with low < high, got ({low}, {high}).")
    return low, high


def _atari(key: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        valid = set(inspect.signature(wrappers.AtariPreprocessing).parameters) - {"env"}
        if unknown := sorted(set(value) - valid):
            raise TypeError(f"wrapper_kwargs['atari'] has unknown keys {unknown}; valid: {sorted(valid)}.")
        return dict(value)
    return {} if _flag(key, value) else None


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "time_limit": _count,
    "atari": _atari,
    "action_repeat": _count,
    "episode_statistics": _flag,
    "grayscale": _flag,
    "resize": _size,
    "flatten": _flag,
    "normalize_observation": _flag,
    "clip_observation": _bounds,
    "frame_stack": _count,
    "normalize_reward": _flag,
    "scale_reward": _factor,
    "clip_reward": _bounds,
}
WRAPPER_KEYS = tuple(_CHECKS)
"""The valid keys of `wrapper_kwargs`, in the order in which they are applied."""


def _check_wrapper_kwargs(wrapper_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys that are on, with normalised values; idempotent."""
    if wrapper_kwargs is None:
        return {}
    if not isinstance(wrapper_kwargs, Mapping):
        raise TypeError(f"wrapper_kwargs must be a dict, got {wrapper_kwargs!r}.")
    if unknown := [key for key in wrapper_kwargs if key not in _CHECKS]:
        raise TypeError(
            f"wrapper_kwargs has unknown keys {unknown}; valid keys: {', '.join(WRAPPER_KEYS)}. Arguments of a "
            "wrapper_class of your own belong into wrapper_class_kwargs, those of the env into env_kwargs."
        )
    checked = {key: _CHECKS[key](key, value) for key, value in wrapper_kwargs.items() if value is not None}
    given = {key: value for key, value in checked.items() if value is not None}
    if "atari" in given:
        atari = given["atari"]
        if "action_repeat" in given:
            atari.setdefault("frame_skip", given.pop("action_repeat"))
        if "resize" in given:
            height, width = given.pop("resize")
            atari.setdefault("screen_size", (width, height))  # that wrapper's order
        if "grayscale" in checked:
            given.pop("grayscale", None)
            atari.setdefault("grayscale_obs", checked["grayscale"] is not None)
    return given


# --- the vector environment ------------------------------------------------------------------------------------------


def _make_native(
    maker: EnvSpec | Callable[..., gym.Env], nb_envs: int, env_kwargs: dict[str, Any], wrapper_kwargs: dict[str, Any]
) -> VecEnv:
    if not isinstance(maker, EnvSpec) or maker.vector_entry_point is None:
        name = maker.id if isinstance(maker, EnvSpec) else maker
        raise ValueError(
            f"vec_env_cls='native': {name} has no vectorised implementation of its own (vector_entry_point). Leave "
            "vec_env_cls out."
        )
    todo = dict(wrapper_kwargs)
    if "time_limit" in todo:
        env_kwargs = {**env_kwargs, "max_episode_steps": todo.pop("time_limit")}
    clip, scale = todo.pop("clip_reward", None), todo.pop("scale_reward", None)
    if todo:
        raise TypeError(
            f"vec_env_cls='native' cannot apply wrapper_kwargs {sorted(todo)} to each env: it takes time_limit, "
            "scale_reward and clip_reward. Set what the implementation itself offers through env_kwargs, wrap the "
            "result in VecNormalize or VecFrameStack, or leave vec_env_cls out."
        )
    vector_env = gym.make_vec(maker, nb_envs, vectorization_mode="vector_entry_point", **env_kwargs)
    if scale is not None:
        vector_env = wrappers.vector.TransformReward(vector_env, lambda rewards: rewards * scale)
    if clip is not None:
        vector_env = wrappers.vector.ClipReward(vector_env, *clip)
    return from_gymnasium(vector_env)


def _make_vec_env(
    env_fns: list[Callable[[], gym.Env]],
    vec_env_cls: Callable[..., VecEnv] | None,
    workers: int | str | None,
    verbose: int,
    vec_env_kwargs: dict[str, Any],
) -> VecEnv:
    cls = SubprocVecEnv if vec_env_cls is None else vec_env_cls
    if workers == "auto":
        takes_workers = isinstance(cls, type) and issubclass(cls, SubprocVecEnv)
        if not takes_workers:
            raise TypeError(f"workers='auto' chooses processes, which {cls} does not have: leave out one of the two.")
        # In-process is a choice only for a user who asked for nothing that needs processes.
        may_be_dummy = vec_env_cls is None and set(vec_env_kwargs) <= _parameters(DummyVecEnv)
        choice, why = _choose(env_fns, may_be_dummy, vec_env_kwargs)
        if verbose:
            where = "in this process" if choice is None else f"in {choice} worker process{'es' * (choice > 1)}"
            envs = f"{len(env_fns)} environment{'s' * (len(env_fns) > 1)}"
            print(f"make_gym_env: workers='auto' runs {envs} {where}: {why}.")
        if choice is None:
            return DummyVecEnv(env_fns, **vec_env_kwargs)
        return cls(env_fns, workers=choice, **vec_env_kwargs)
    if workers is not None:
        vec_env_kwargs = {"workers": workers, **vec_env_kwargs}
    return cls(env_fns, **vec_env_kwargs)


def _parameters(cls: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(cls).parameters)


# A vector step in worker processes costs about this much more than the environments' own steps (seconds).
ROUND_TRIP = 100e-6


def _choose(
    env_fns: list[Callable[[], gym.Env]], may_be_dummy: bool, vec_env_kwargs: dict[str, Any]
) -> tuple[int | None, str]:
    """Choose the number of workers (None: no processes) by timing one env in one worker; and say why.

    Stepping N envs of t seconds each in W workers rather than one after the other saves N * t * (1 - 1/W) seconds per
    vector step and costs one round trip: for cheap environments the latter is more.
    """
    process_kwargs = {
        key: vec_env_kwargs[key]
        for key in ("start_method", "start_timeout", "worker_env", "import_main")
        if key in vec_env_kwargs
    }
    probe = probe_env(env_fns[0], **process_kwargs)
    nb_workers, why = choose_workers(len(env_fns), probe)
    saved = len(env_fns) * probe.seconds * (1 - 1 / nb_workers)
    if may_be_dummy and not probe.waits and saved < ROUND_TRIP:
        if len(env_fns) == 1:
            return None, "one environment alone gains nothing from a process of its own"
        return None, (
            f"a step takes {probe.seconds * 1e6:.0f} us, so {nb_workers} workers would save {saved * 1e6:.0f} us per "
            f"vector step; talking to them costs more, about {ROUND_TRIP * 1e6:.0f} us"
        )
    return nb_workers, why
