"""Callbacks: hooks into `Agent.fit` and `Agent.test`, the loggers, and the bridge to Keras' own callbacks.

Every callback may override Keras' hooks, the hooks of `rl.callbacks.Callback`, or both; each hook that it
overrides is called. For Keras' hooks

* an epoch is a finished episode: epoch `n` is the `n`-th episode that ended. With several lanes, whose
  episodes overlap, epochs still begin and end strictly in turn;
* a batch is a step of one lane, numbered from 0 in each epoch;
* `logs` hold scalars only: `episode_reward`, `nb_episode_steps`, `nb_steps`, `duration`, the loss and the
  metrics. A metric of an episode without updates is NaN. `EarlyStopping`, `ReduceLROnPlateau` and
  `ModelCheckpoint(save_best_only=True)` are not called while the value they monitor is NaN, and need no
  `mode` for rewards, losses and errors. Their `patience` counts episodes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from rl.common.misc_util import warn_user

__all__ = [
    "Callback",
    "CallbackList",
    "FileLogger",
    "ModelIntervalCheckpoint",
    "TestLogger",
    "TrainEpisodeLogger",
    "TrainIntervalLogger",
    "Visualizer",
    "WandbLogger",
]

Logs = dict[str, Any]


class Callback(keras.callbacks.Callback):
    """Base class of callbacks that follow episodes, steps and actions.

    Only hooks that a subclass overrides are called, so a callback without step hooks costs nothing per step.
    With N lanes the episodes of different lanes overlap: keep what belongs to an episode under
    `logs["episode"]`.

    Attributes:
        model: The agent.
        env: The environment as it was given to `fit` or `test`.
        params: `nb_steps` and/or `nb_episodes` (what was asked for), `nb_lanes`, `metrics` (names),
            `verbose`.
    """

    env: Any = None

    def _set_env(self, env: Any) -> None:
        self.env = env

    def on_episode_begin(self, episode: int, logs: Logs | None = None) -> None:
        """Called when an episode of a lane begins.

        Args:
            episode: Number of the episode, from 0; never used twice in the life of an agent.
            logs: `lane`.
        """

    def on_episode_end(self, episode: int, logs: Logs | None = None) -> None:
        """Called when an episode of a lane has ended.

        Args:
            episode: Number of the episode, as in `on_episode_begin`.
            logs: `episode_reward`, `nb_episode_steps`, `nb_steps` (env steps in the life of the agent; in
                `test`: steps of the episode), `duration` in seconds, `lane` and, in `fit`, the mean of each
                of the agent's metrics over the updates made during the episode (NaN where there were none).
        """

    def on_step_begin(self, step: int, logs: Logs | None = None) -> None:
        """Called once per lane before a step; `step` counts from 0 in each episode."""

    def on_step_end(self, step: int, logs: Logs | None = None) -> None:
        """Called once per lane after a step.

        Args:
            step: Step in the episode, from 0.
            logs: `action`, `observation` (the next one), `reward`, `episode`, `info`, `lane` and, in `fit`,
                `metrics`: one value per name in `model.metrics_names`, NaN where the step made no update.
        """

    def on_action_begin(self, action: Any, logs: Logs | None = None) -> None:
        """Called once per lane before the environment sees the action."""

    def on_action_end(self, action: Any, logs: Logs | None = None) -> None:
        """Called once per lane after the environment has seen the action."""

    def on_vector_step_end(self, logs: Logs | None = None) -> None:
        """Called once after all lanes have made a step: the cheap hook where only totals matter.

        It comes before the `on_episode_end` of episodes that the step ended.

        Args:
            logs: `nb_steps` (env steps in the life of the agent), `step` (env steps in this run), `reward` of
                shape `(N,)`.
        """


_STEP_HOOKS = ("on_step_begin", "on_step_end", "on_action_begin", "on_action_end")
_BATCH_HOOKS = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
_OTHER_HOOKS = ("on_episode_begin", "on_episode_end", "on_vector_step_end", "on_epoch_begin")


def _overrides(callback: Any, name: str) -> bool:
    """Whether a callback has its own hook: from a class, or set on the instance as `LambdaCallback` does."""
    hook = getattr(callback, name, None)
    return hook is not None and getattr(hook, "__func__", hook) is not getattr(Callback, name)


def _wants_batches(callback: Any, name: str) -> bool:
    # Keras' default batch hooks forward to the older aliases. Checkpoints that save by epochs override the
    # batch hook only to do nothing in it: skipping them spares the per-lane calls.
    by_epoch = getattr(callback, "save_freq", None) == "epoch"
    return not by_epoch and (_overrides(callback, name) or _overrides(callback, _BATCH_HOOKS[name]))


def _scalars(logs: Logs) -> Logs:
    """The scalar entries as Python numbers; integers stay integers: `{nb_steps:06d}` works in a file name."""
    numbers = {}
    for name, value in logs.items():
        if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
            value = value.item()
        if isinstance(value, (int, float)):
            numbers[name] = value
    return numbers


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_monitor(callback: Any) -> bool:
    return all(hasattr(callback, name) for name in ("monitor", "mode", "monitor_op"))


def _resolve_mode(callback: Any) -> None:
    """Sets the direction of a monitor on 'auto': Keras finds it only for the metrics of its own `compile`."""
    name = str(callback.monitor).lower()
    if callback.mode != "auto":
        return
    if any(part in name for part in ("reward", "return", "accuracy", "success")):
        callback.mode = "max"
    elif any(part in name for part in ("loss", "error", "mae", "mse", "mape", "msle")):
        callback.mode = "min"


class CallbackList:
    """Calls the hooks of all callbacks, each only where it is overridden.

    For one event the episode and step hooks of all callbacks come first, then the epoch and batch hooks, each
    in the order of the list. A value that an episode hook adds to `logs` is thus seen by Keras' loggers.

    Args:
        callbacks: A callback, a (nested) list of them, or None. A `keras.callbacks.History` is added unless
            there is one.
        model: The agent.
        env: The environment, for callbacks that use `self.env`.
        params: See `Callback.params`.
        first_epoch: Number of the first epoch.

    Attributes:
        history: The `keras.callbacks.History`.
        wants_steps: Whether a hook for the steps of single lanes is overridden; if not, these calls may be
            left out.
        wants_vector_steps: The same for `on_vector_step_end`.

    Raises:
        TypeError: If an entry of `callbacks` is not a callback.
    """

    def __init__(
        self,
        callbacks: Any = None,
        model: Any = None,
        env: Any = None,
        params: Logs | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.callbacks: list[Any] = keras.tree.flatten(callbacks) if callbacks is not None else []
        for callback in self.callbacks:
            if isinstance(callback, type) or not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(
                    "Expected instances of rl.callbacks.Callback or keras.callbacks.Callback, "
                    f"got {callback!r}" + (", a class: add parentheses." if isinstance(callback, type) else ".")
                )
        histories = [c for c in self.callbacks if isinstance(c, keras.callbacks.History)]
        self.history = histories[0] if histories else keras.callbacks.History()
        if not histories:
            self.callbacks.append(self.history)  # last: it records what other callbacks add to the logs
        self.params = dict(params or {})
        # What keras.callbacks.ProgbarLogger looks up; the length of an episode is not known beforehand.
        keras_params = {"verbose": 1, "epochs": self.params.get("nb_episodes") or 1, "steps": None}
        for callback in self.callbacks:
            own = isinstance(callback, Callback)
            callback.set_params(self.params if own else {**keras_params, **self.params})
            callback.set_model(model)
            if hasattr(callback, "_set_env"):
                callback._set_env(env)
            if _is_monitor(callback):
                _resolve_mode(callback)

        self._model, self._names = model, list(model.metrics_names)
        self._begun: list[Any] = []
        self._epoch, self._batch, self._epoch_open, self._batch_open = first_epoch, 0, False, False
        self._bars = [c for c in self.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
        self._monitors = [c for c in self.callbacks if _is_monitor(c) and getattr(c, "save_best_only", True)]
        self._hooks: dict[str, list[Callable[..., Any]]] = {
            name: [getattr(c, name) for c in self.callbacks if _overrides(c, name)]
            for name in (*_OTHER_HOOKS, *_STEP_HOOKS)
        }
        self._batch_begin = [c for c in self.callbacks if _wants_batches(c, "on_train_batch_begin")]
        self._batch_end = [c for c in self.callbacks if _wants_batches(c, "on_train_batch_end")]
        self._epoch_end = [c for c in self.callbacks if _overrides(c, "on_epoch_end")]
        self.wants_vector_steps = bool(self._hooks["on_vector_step_end"])
        step_hooks = any(self._hooks[name] for name in _STEP_HOOKS)
        self.wants_steps = bool(step_hooks or self._batch_begin or self._batch_end)

    def _call(self, hook: str, *args: Any) -> None:
        for function in self._hooks[hook]:
            function(*args)

    def on_train_begin(self, logs: Logs) -> None:
        """Begins a run of `fit` or `test`."""
        for callback in self.callbacks:
            callback.on_train_begin(logs)
            self._begun.append(callback)

    def on_train_end(self, logs: Logs) -> None:
        """Ends a run for all callbacks that have begun it; `logs` holds `did_abort`."""
        while self._begun:
            self._begun.pop(0).on_train_end(logs)

    def on_episode_begin(self, episode: int, logs: Logs) -> None:
        """Begins an episode of a lane, and an epoch if none is open."""
        self._call("on_episode_begin", episode, logs)
        self._open_epoch()

    def on_episode_end(self, episode: int, logs: Logs) -> None:
        """Ends an episode of a lane, and with it an epoch."""
        self._call("on_episode_end", episode, logs)
        self._open_epoch()
        logs = _scalars(logs)
        logs.pop("lane", None)  # a curve of lane numbers helps nobody
        for callback in self._epoch_end:
            if callback in self._monitors and _is_nan(logs.get(callback.monitor)):
                if isinstance(callback, keras.callbacks.ReduceLROnPlateau):
                    # It would add this to the logs; CSVLogger takes its columns from the first row.
                    rate = self._model.optimizer.learning_rate
                    logs["learning_rate"] = float(keras.ops.convert_to_numpy(rate))
            elif callback in self._bars:
                callback.on_epoch_end(self._epoch, {name: v for name, v in logs.items() if not _is_nan(v)})
            else:
                callback.on_epoch_end(self._epoch, logs)
        self._epoch += 1
        self._epoch_open, self._batch = False, 0

    def on_step_begin(self, step: int, logs: Logs) -> None:
        """Begins a step of a lane, which is a batch for Keras' callbacks."""
        self._call("on_step_begin", step, logs)
        self._open_batch()

    def on_step_end(self, step: int, logs: Logs) -> None:
        """Ends a step of a lane."""
        self._call("on_step_end", step, logs)
        self._open_batch()
        if self._batch_end:
            batch_logs = {"reward": float(logs["reward"])}
            # No update, no entry: TerminateOnNaN would take the NaN of a step without update for a bad loss.
            metrics = zip(self._names, map(float, logs.get("metrics", ())), strict=False)
            batch_logs.update((name, value) for name, value in metrics if not math.isnan(value))
            for callback in self._batch_end:
                if callback in self._monitors:
                    # Keras finds out what "best" means at the end of the first epoch.
                    if callback.monitor_op is None or callback.monitor not in batch_logs:
                        continue
                # TensorBoard throws these logs away by default, and takes 100 us per entry to do so.
                unused = getattr(callback, "update_freq", None) == "epoch"
                callback.on_train_batch_end(self._batch, {} if unused else batch_logs)
        self._batch += 1
        self._batch_open = False

    def on_action_begin(self, action: Any, logs: Logs) -> None:
        """Announces the action of a lane."""
        self._call("on_action_begin", action, logs)

    def on_action_end(self, action: Any, logs: Logs) -> None:
        """Says that the environment has seen the action of a lane."""
        self._call("on_action_end", action, logs)

    def on_vector_step_end(self, logs: Logs) -> None:
        """Ends a step of all lanes."""
        self._call("on_vector_step_end", logs)

    def _open_epoch(self) -> None:
        if not self._epoch_open:
            self._epoch_open = True
            for bar in self._bars:
                bar.target = None  # it would keep the length of the first episode for all
            self._call("on_epoch_begin", self._epoch, {})

    def _open_batch(self) -> None:
        self._open_epoch()
        if not self._batch_open:  # the steps of the lanes overlap, batches must not
            self._batch_open = True
            for callback in self._batch_begin:
                callback.on_train_batch_begin(self._batch, {})


def _check_interval(interval: Any, owner: str, unit: str) -> int:
    if int(interval) != interval or interval < 1:
        raise ValueError(f"{owner}: interval is a number of {unit}, at least 1; got {interval!r}.")
    return int(interval)


def _print(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)  # flushed, so that a log file can be followed


def _number(value: float | None, width: int = 9, digits: int = 4) -> str:
    """A number with as many decimals as fit into a width of at least 8; '--' where there is none.

    One that would keep a single digit, or none, is written with a power of ten.
    """
    if value is None or math.isnan(value):
        return "--"
    if not 0 < abs(value) < 10.0 ** (1 - digits):
        for n in range(digits, -1, -1):
            if len(text := f"{value:.{n}f}") <= width:
                return text
    return f"{value:.1e}"


class _Table:
    """Rows of right-aligned columns, at most 100 characters with up to four metrics; a header every 50 rows."""

    def __init__(self, columns: Sequence[tuple[str, int]], metrics: Iterable[str]) -> None:
        columns = [*columns, *((name, max(10, len(name) + 1)) for name in metrics)]
        roomy = sum(width for _, width in columns) + len(columns) <= 100
        self.columns = [(name, width + roomy) for name, width in columns]
        self.rows = 0

    def row(self, cells: Sequence[str]) -> str:
        text = self._line(cells)
        if self.rows % 50 == 0:
            text = self._line([name for name, _ in self.columns]) + "\n" + text
        self.rows += 1
        return text

    def _line(self, cells: Sequence[str]) -> str:
        return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, self.columns, strict=True))


class _TrainLogger(Callback):
    """What the two loggers of `fit` share: opening and closing line, and the steps done in this run."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.train_start = time.perf_counter()
        self.metrics_names = list(self.model.metrics_names)
        self.nb_steps = self.params.get("nb_steps")
        limits = [(self.nb_steps, "steps"), (self.params.get("nb_episodes"), "episodes")]
        _print("Training for " + " or ".join(f"{n} {unit}" for n, unit in limits if n is not None) + " ...")

    def on_train_end(self, logs: Any = None) -> None:
        state = "interrupted after" if logs.get("did_abort") else "done, took"
        _print(f"{state} {time.perf_counter() - self.train_start:.3f} seconds")

    def _table(self, columns: Sequence[tuple[str, int]]) -> _Table:
        # The first column grows with the number of steps asked for: "   500/100000".
        width = max(13, 2 * len(str(self.nb_steps)) + 1)
        return _Table([("steps", width), *columns], self.metrics_names)

    def _progress(self, step: int) -> str:
        return f"{step}/{self.nb_steps}" if self.nb_steps is not None else str(step)


class TestLogger(Callback):
    """Prints a line per episode of `test`: number, return and length. Used by `test(verbose=1)`."""

    __test__ = False  # not a test case, whatever pytest thinks of the name

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the heading."""
        self.nb_finished = 0
        _print(f"Testing for {self.params['nb_episodes']} episodes ...")

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Prints the line of an episode, numbered by its end: lanes do not finish in the order they began."""
        self.nb_finished += 1
        reward, steps = logs["episode_reward"], logs["nb_episode_steps"]
        _print(f"Episode {self.nb_finished}: reward: {reward:.3f}, steps: {steps}")


class TrainEpisodeLogger(_TrainLogger):
    """Prints a line per finished episode of `fit`. Used by `fit(verbose=2)`.

    Columns: env steps done in this run, number of the episode, its duration, its steps, env steps per second
    over all lanes during the episode, its return, and the mean of each metric over the updates made meanwhile
    ("--" without updates). Needs constant memory: nothing is kept per step.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the heading."""
        super().on_train_begin(logs)
        self.first_step = self.model.step
        self.begun: dict[int, int] = {}
        columns = [("episode", 8), ("duration", 9), ("length", 7), ("steps/s", 8), ("reward", 10)]
        self.table = self._table(columns)

    def on_episode_begin(self, episode: int, logs: Any = None) -> None:
        """Notes at which step the episode began."""
        self.begun[episode] = self.model.step

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Prints the line of the episode."""
        duration, nb_steps = logs["duration"], logs["nb_steps"]
        rate = (nb_steps - self.begun.pop(episode, nb_steps - logs["nb_episode_steps"])) / max(duration, 1e-9)
        cells = [
            self._progress(nb_steps - self.first_step),
            str(episode + 1),
            f"{duration:.2f}s" if duration < 1000 else f"{duration:.0f}s",
            str(logs["nb_episode_steps"]),
            f"{rate:.0f}",
            _number(logs["episode_reward"], digits=3),
        ]
        _print(self.table.row(cells + [_number(logs.get(name)) for name in self.metrics_names]))


class TrainIntervalLogger(_TrainLogger):
    """Shows a progress bar, and prints a summary line per interval of `fit`. Used by `fit(verbose=1)`.

    The bar shows steps per second and the mean return of the last 100 episodes; where the output is not a
    terminal there are only the summaries: steps done, steps per second, number of episodes finished in the
    interval, mean, least and greatest return of these, and the mean of each metric over the updates made in
    the interval ("--" without updates).

    Args:
        interval: Env steps between two summaries. Default 10000.

    Raises:
        ValueError: If `interval` is not a whole number of at least 1.
    """

    def __init__(self, interval: int = 10000) -> None:
        super().__init__()
        self.interval = _check_interval(interval, "TrainIntervalLogger", "env steps")

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the heading and starts the first interval."""
        super().on_train_begin(logs)
        self.table = self._table([("steps/s", 8), ("episodes", 9), ("reward", 10), ("min", 9), ("max", 9)])
        self.has_bar = sys.stdout.isatty() or "ipykernel" in sys.modules
        self.bar_width = 0
        self.recent: deque[float] = deque(maxlen=100)
        self.returns: list[float] = []
        self.step, self.first, self.next = 0, 0, self.interval
        self.totals = self._metric_totals()
        self.start = self.drawn = time.perf_counter()

    def _metric_totals(self) -> np.ndarray:
        """Sum of each metric over all updates so far, and their number: `(2, M)`."""
        state, size = self.model.run_state, len(self.metrics_names)
        return np.array([np.broadcast_to(total, size) for total in (state.metric_sum, state.metric_count)])

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Adds the return to the statistics of the interval."""
        self.returns.append(float(logs["episode_reward"]))
        self.recent.append(self.returns[-1])

    def on_vector_step_end(self, logs: Any = None) -> None:
        """Moves the bar, at most ten times a second, or starts a new one."""
        if self.step >= self.next:  # only now: the episodes that its last step ended belong to the interval
            self._print_summary()
        self.step = logs["step"]
        if self.step >= self.next:
            self._end_interval()
        elif self.has_bar and (now := time.perf_counter()) - self.drawn >= 0.1:
            self.drawn = now
            self._draw(now)

    def on_train_end(self, logs: Any = None) -> None:
        """Prints the summary of the last, shorter interval and the time taken."""
        if self.step > self.first:
            if self.step < self.next:
                self._end_interval()
            self._print_summary()
        super().on_train_end(logs)

    def _draw(self, now: float) -> None:
        size = self.next - self.first
        if self.nb_steps is not None:
            size = min(size, max(self.nb_steps - self.first, 1))
        done = self.step - self.first
        filled = min(30 * done // size, 30)
        mean = _number(sum(self.recent) / len(self.recent) if self.recent else None, digits=3)
        text = f"{done:>{len(str(size))}}/{size} [{'=' * filled}{'.' * (30 - filled)}]"
        text += f" {done / (now - self.start):.0f} steps/s - mean reward: {mean}"
        text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be overwritten
        _print("\r" + text.ljust(self.bar_width), end="")
        self.bar_width = len(text)

    def _end_interval(self) -> None:
        now, totals = time.perf_counter(), self._metric_totals()
        self.duration, self.start = now - self.start, now
        (self.sums, self.counts), self.totals = totals - self.totals, totals

    def _print_summary(self) -> None:
        rate = (self.step - self.first) / max(self.duration, 1e-9)
        returns = self.returns or [math.nan]
        cells = [self._progress(self.step), f"{rate:.0f}", str(len(self.returns))]
        cells.append(_number(sum(returns) / len(returns), digits=3))
        cells += [_number(value, width=8, digits=3) for value in (min(returns), max(returns))]
        cells += [_number(total / n if n else None) for total, n in zip(self.sums, self.counts, strict=True)]
        _print(("\r" + " " * self.bar_width + "\r" if self.bar_width else "") + self.table.row(cells))
        self.bar_width, self.returns = 0, []
        self.first, self.next = self.step, (self.step // self.interval + 1) * self.interval


def _finite(value: Any) -> Any:
    return value if value is not None and math.isfinite(value) else None


class FileLogger(Callback):
    """Writes the log of all episodes to a JSON file: one list per quantity, all of equal length, by episode.

    The lists are `episode`, `episode_reward`, `nb_episode_steps`, `nb_steps`, `duration` (seconds), `lane`
    and one per metric. What is not a finite number, or is missing in an episode, is `null`. The file is
    replaced as a whole, so it is readable at any time. An object used for several runs writes the episodes of
    all of them.

    Args:
        filepath: The file.
        interval: Episodes between two writes. Default None: write at the end of the run only.

    Raises:
        ValueError: If `interval` is not a whole number of at least 1.
    """

    def __init__(self, filepath: str | os.PathLike[str], interval: int | None = None) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        self.interval = None if interval is None else _check_interval(interval, "FileLogger", "episodes")
        self.episodes: list[Logs] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the folder of the file now, where that can fail without the loss of a training run."""
        os.makedirs(os.path.dirname(os.path.abspath(self.filepath)), exist_ok=True)

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Keeps the logs of the episode."""
        self.episodes.append({"episode": int(episode), **_scalars(logs)})
        if self.interval is not None and len(self.episodes) % self.interval == 0:
            self.save_data()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the file."""
        self.save_data()

    def save_data(self) -> None:
        """Writes all episodes so far; does nothing if there are none."""
        if not self.episodes:
            return
        rows = sorted(self.episodes, key=lambda row: row["episode"])
        names = dict.fromkeys(name for row in rows for name in row)
        data = {name: [_finite(row.get(name)) for row in rows] for name in names}
        temporary = f"{self.filepath}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(data, file, allow_nan=False)
            os.replace(temporary, self.filepath)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)


class ModelIntervalCheckpoint(Callback):
    """Saves the agent's weights during `fit` whenever its lifetime env steps pass a multiple of an interval.

    Args:
        filepath: The file, a format string over `step` (env steps in the life of the agent) and the logs of
            the last finished episode (`episode_reward`, metrics; NaN before the first), as in
            `"dqn_{step}.weights.h5"`.
        interval: Env steps, summed over lanes, between two files.
        verbose: 1 prints a line per file. Default 0.

    Raises:
        ValueError: If `interval` is not a whole number of at least 1 or, at the start of `fit`, if `filepath`
            has an unknown field.
    """

    def __init__(self, filepath: str | os.PathLike[str], interval: int, verbose: int = 0) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        self.interval = _check_interval(interval, "ModelIntervalCheckpoint", "env steps")
        self.verbose = verbose
        self.values: Logs = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the file name."""
        self.last = self.model.step
        names = ("episode_reward", "duration", *self.model.metrics_names)
        self.values = {**dict.fromkeys(names, math.nan), "nb_episode_steps": 0, "episode": 0, "lane": 0, **self.values}
        self._path(self.last)

    def _path(self, step: int) -> str:
        values = {**self.values, "step": step, "nb_steps": step}
        try:
            return self.filepath.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"ModelIntervalCheckpoint: cannot fill in filepath {self.filepath!r} ({error!r}). "
                f"Known fields: {', '.join(sorted(values))}."
            ) from error

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Keeps the logs of the episode for the name of the next file."""
        self.values.update(_scalars(logs), episode=episode)

    def on_vector_step_end(self, logs: Any = None) -> None:
        """Saves where a multiple of the interval has been passed."""
        if not self.model.training:
            return
        step = logs["nb_steps"]
        if step // self.interval > self.last // self.interval:
            path = self._path(step)
            if self.verbose:
                _print(f"Step {step}: saving model to {path}")
            self.model.save_weights(path, overwrite=True)
        self.last = step


class Visualizer(Callback):
    """Calls `env.render()` after each step. Used by `visualize=True`.

    An environment that was made without a render mode cannot be shown: one warning says so, and the run goes
    on.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks whether the environment can be shown."""
        # Environments of the time before render modes have a render method and no attribute.
        has_mode = getattr(self.env, "render_mode", "unknown") is not None
        self.can_render = has_mode and callable(getattr(self.env, "render", None))
        if not self.can_render:
            name = type(getattr(self.env, "unwrapped", self.env)).__name__
            how = "Make it with gymnasium.make(..., render_mode='human'), or pass visualize=False."
            warn_user(f"Nothing to visualize: {name} has no render mode. {how}")

    def on_vector_step_end(self, logs: Any = None) -> None:
        """Shows the environment; several lanes are one picture, so this is no hook of a single lane."""
        if self.can_render:
            self.env.render()


class WandbLogger(Callback):
    """Logs each episode to Weights & Biases.

    Args:
        **kwargs: Arguments of `wandb.init`. Default project: "keras-rl".

    Raises:
        ImportError: If the package `wandb` is not installed.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbLogger needs the package wandb: pip install wandb") from error
        self.run = wandb.init(**{"project": "keras-rl", **kwargs})

    def on_train_begin(self, logs: Any = None) -> None:
        """Records the parameters of the run."""
        env = getattr(getattr(self.env, "spec", None), "id", type(self.env).__name__)
        config = {"params": self.params, "agent": type(self.model).__name__, "env": env}
        self.run.config.update(config, allow_val_change=True)  # of a second fit

    def on_episode_end(self, episode: int, logs: Any = None) -> None:
        """Logs the scalars of the episode; `nb_steps` is one of them, for the axis of a chart."""
        values = {name: value for name, value in _scalars(logs).items() if not _is_nan(value)}
        self.run.log({**values, "episode": episode})
