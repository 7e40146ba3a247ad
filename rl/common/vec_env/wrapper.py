"""The base of wrappers around a whole vector environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rl.common.vec_env.base import VecEnv

__all__ = ["StepResult", "VecEnvWrapper", "layers", "with_final_obs"]

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
        owners = [layer for layer in layers(self.venv) if name in vars(layer) or hasattr(type(layer), name)]
        if not owners:
            chain = " > ".join(type(layer).__name__ for layer in layers(self))
            raise AttributeError(f"None of {chain} has an attribute {name!r}.")
        if len(owners) > 1:
            raise AttributeError(
                f"{name!r} is ambiguous: {' and '.join(type(layer).__name__ for layer in owners)} have it. Ask the one "
                "you mean, by way of .venv."
            )
        return getattr(owners[0], name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.venv!r}>"


def layers(env: Any) -> Iterator[Any]:
    """A vector env and those inside it, from the outside in."""
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("venv")


def with_final_obs(infos: list[dict[str, Any]], change: Callable[[int, Any], Any]) -> list[dict[str, Any]]:
    """Infos whose `final_obs` are what `change(lane, final_obs)` makes of them."""
    # New dicts: the vector env inside keeps the old ones for its own next_obs().
    return [
        {**info, "final_obs": change(lane, info["final_obs"])} if "final_obs" in info else info
        for lane, info in enumerate(infos)
    ]
