"""Values that are not finite, found where they appear."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.common.misc_util import tree_map, tree_paths
from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.wrapper import StepResult, VecEnvWrapper

__all__ = ["VecCheckNan"]


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
