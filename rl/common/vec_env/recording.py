"""What becomes of the episodes, on disk: a table, films."""

from __future__ import annotations

import csv
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rl.common.vec_env.base import VecEnv
from rl.common.vec_env.wrapper import StepResult, VecEnvWrapper

__all__ = ["VecMonitor", "VecVideoRecorder"]


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
