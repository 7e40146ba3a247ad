"""The one interaction loop: `fit` and `test`, one env and many, on-policy and off-policy.

It moves data between a driver with N lanes and an agent with ``act`` and ``observe``, fires the hooks, and knows
when to stop. It knows no algorithm.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.common.interrupts import Interrupts
from rl.common.misc_util import tree_map

if TYPE_CHECKING:
    from rl.callbacks import CallbackList
    from rl.core import Agent
    from rl.driver import EnvDriver, Transition


class RunState:
    """What an agent counts and remembers while it interacts: plain slots, since Keras attributes are slow to assign.

    Attributes:
        training: True in `fit`, False in `test`.
        step: Lifetime env steps, summed over lanes.
        requested: Lifetime env steps that were asked for; the last vector step may overshoot them.
        episode: Lifetime number of episodes begun: the id of the next one.
        finished: Lifetime number of episodes that ended; others were left open when their env was left.
        nb_updates: Lifetime gradient steps.
        owed: Gradient steps that are due and not taken yet (fewer than `steps_per_execution`).
        overlap: Learning takes place while the env steps, in `Agent.learn`.
        learnt: Lifetime env steps whose gradient steps are counted in `owed`, where learning overlaps.
        acted_on: The observations that the running step acts on, likewise.
        lane_steps: `(N,)` steps of each lane since it was opened, where something depends on them.
        windows: Where recent frames are looked up: the memory in `fit`, a small one of its own in `test`.
        metric_names: The names of the metrics that are summed.
        metric_sum: Sum of each metric over all updates where it was finite, `(M,)`.
        metric_count: In how many updates that was, `(M,)`.
        recent_observation: For agents driven by `forward` and `backward`: what `forward` was given last.
        recent_action: What it answered.
        hand: Likewise: how far such an agent has come, a `rl.legacy.Hand`.
    """

    __slots__ = (
        "acted_on",
        "episode",
        "finished",
        "hand",
        "lane_steps",
        "learnt",
        "metric_count",
        "metric_names",
        "metric_sum",
        "nb_updates",
        "overlap",
        "owed",
        "recent_action",
        "recent_observation",
        "requested",
        "step",
        "training",
        "windows",
    )
    COUNTERS = ("step", "requested", "episode", "finished", "nb_updates", "owed")

    def __init__(self, training: bool = False):
        self.training = training
        self.step = self.requested = self.episode = self.finished = self.nb_updates = self.owed = self.learnt = 0
        self.overlap = False
        self.acted_on: Any = None
        self.windows: Any = None
        self.lane_steps: Any = None
        self.metric_names: list[str] = []
        self.metric_sum: Any = 0.0
        self.metric_count: Any = 0.0
        self.recent_observation: Any = None
        self.recent_action: Any = None
        self.hand: Any = None

    def add(self, metrics: np.ndarray | None, nb_updates: int) -> None:
        """Adds means over the updates since there were `nb_updates` to the sums, where they are finite."""
        if metrics is not None:
            weight: Any = max(self.nb_updates - nb_updates, 1)
            finite = np.isfinite(metrics)
            if np.count_nonzero(finite) < len(finite):
                weight, metrics = weight * finite, np.where(finite, metrics, 0.0)
            # In float64: single precision loses an update's loss among those of a long life.
            self.metric_sum = self.metric_sum + np.multiply(metrics, weight, dtype=np.float64)
            self.metric_count = self.metric_count + weight


class Lanes:
    """A driver and the record of the episode that each of its lanes is in. It outlives a `fit`, as the episodes do."""

    def __init__(self, driver: EnvDriver):
        n = driver.nb_lanes
        self.driver = driver
        self.open = np.zeros(n, bool)
        self.episode = np.zeros(n, np.int64)
        self.length = np.zeros(n, np.int64)
        self.episode_reward = np.zeros(n, np.float64)
        self.started_at = np.zeros(n, np.float64)
        self.metrics_at_start: list[Any] = [None] * n

    def follow(self, metric_names: list[str], state: RunState) -> None:
        """Starts the sums of the metrics anew if they are others than before, as after a second `compile`."""
        if metric_names != state.metric_names:
            state.metric_names, state.metric_sum, state.metric_count = metric_names, 0.0, 0.0
            self.metrics_at_start = [(0.0, 0.0)] * len(self.open)

    def begin(self, lane: int, state: RunState) -> None:
        """Opens a new episode in a lane."""
        self.open[lane] = True
        self.episode[lane] = state.episode
        state.episode += 1
        self.length[lane] = 0
        self.episode_reward[lane] = 0.0
        self.started_at[lane] = time.monotonic()
        self.metrics_at_start[lane] = (np.copy(state.metric_sum), np.copy(state.metric_count))

    def step_logs(
        self, lane: int, transition: Transition, state: RunState, metrics: np.ndarray | None, nb_metrics: int
    ) -> dict[str, Any]:
        """The logs of a lane's step; in `fit` with the means of the metrics over its updates, NaN without one."""
        logs = {
            "action": transition.action[lane],
            "observation": tree_map(lambda x: x[lane], transition.next_observation),
            "reward": float(transition.reward[lane]),
            "episode": int(self.episode[lane]),
            "info": transition.info[lane],
            "lane": lane,
        }
        if state.training:
            logs["metrics"] = [float("nan")] * nb_metrics if metrics is None else [float(m) for m in metrics]
        return logs

    def episode_logs(self, lane: int, state: RunState, metrics_names: list[str]) -> dict[str, Any]:
        """The logs of an episode that ended: return, length, and the mean of each metric over its updates."""
        length = int(self.length[lane])
        logs = {
            "episode_reward": float(self.episode_reward[lane]),
            "nb_episode_steps": length,
            "nb_steps": state.step if state.training else length,
            "duration": time.monotonic() - self.started_at[lane],
            "lane": lane,
        }
        if state.training:
            sum0, count0 = self.metrics_at_start[lane]
            count = np.broadcast_to(state.metric_count - count0, len(metrics_names))
            total = np.broadcast_to(state.metric_sum - sum0, len(metrics_names))
            for i, name in enumerate(metrics_names):
                logs[name] = float(total[i] / count[i]) if count[i] > 0 else float("nan")
        return logs


def run(
    agent: Agent,
    lanes: Lanes,
    hooks: CallbackList,
    *,
    stop_step: int | None = None,
    nb_episodes: int | None = None,
    quota: np.ndarray | None = None,
) -> bool:
    """Lets an agent interact until a limit is reached, it is told to stop, or the user presses Ctrl-C.

    Args:
        agent: Its `act` and `observe` are called once per vector step.
        lanes: The driver with the lanes' open episodes.
        hooks: The callbacks.
        stop_step: Stop once the agent's lifetime env steps reach this number.
        nb_episodes: Stop once this many episodes have ended in this run.
        quota: `(N,)` episodes that each lane has still to report; a lane that has none left is not reported.

    Returns:
        True where the user interrupted.
    """
    driver, state = lanes.driver, agent.run_state
    first_step, nb_ended = state.step, 0
    names = list(agent.metrics_names)
    reported = np.ones(driver.nb_lanes, bool) if quota is None else quota > 0
    acting: Any = ()  # lanes whose steps are reported; a lane that only resets itself has no step
    learnt: Any = None

    def learn() -> None:
        nonlocal learnt
        learnt = agent.learn()

    def before() -> None:
        for lane, episode in acting:
            hooks.on_action_begin(action[lane], {"episode": episode, "lane": lane})

    def after() -> None:
        for lane, episode in acting:
            hooks.on_action_end(action[lane], {"episode": episode, "lane": lane})

    for lane in np.flatnonzero(lanes.open):  # an episode left open by the last `fit` is new to these callbacks
        hooks.on_episode_begin(int(lanes.episode[lane]), {"lane": int(lane)})

    with Interrupts() as interrupts:
        while stop_step is None or state.step < stop_step:
            observation = driver.observe()
            if driver.started.any():
                for lane in np.flatnonzero(driver.started):
                    lanes.begin(int(lane), state)
                    if reported[lane]:
                        hooks.on_episode_begin(int(lanes.episode[lane]), {"lane": int(lane)})
                agent.begin_episodes()
            if hooks.wants_steps:
                acting = [(int(i), int(lanes.episode[i])) for i in np.flatnonzero(lanes.open & reported)]
            for lane, episode in acting:
                hooks.on_step_begin(int(lanes.length[lane]), {"episode": episode, "lane": lane})
            nb_updates = state.nb_updates
            action = agent.act(observation)
            transition = driver.step(action, learn if state.overlap else None, before, after)
            valid = transition.valid
            state.step += int(np.count_nonzero(valid))
            lanes.length += valid
            lanes.episode_reward += transition.reward
            metrics = agent.observe(transition)
            metrics = learnt if state.overlap else metrics
            state.add(metrics, nb_updates)
            for lane, _ in acting:
                logs = lanes.step_logs(lane, transition, state, metrics, len(names))
                hooks.on_step_end(int(lanes.length[lane]) - 1, logs)
            if hooks.wants_vector_steps:
                done = {"nb_steps": state.step, "step": state.step - first_step, "reward": transition.reward}
                hooks.on_vector_step_end(done)
            ended = transition.terminated | transition.truncated
            if ended.any():
                agent.end_episodes()
                for lane in np.flatnonzero(ended & lanes.open):
                    lanes.open[lane] = False
                    state.finished += 1
                    if reported[lane]:
                        nb_ended += 1
                        if quota is not None:
                            quota[lane] -= 1
                            reported[lane] = quota[lane] > 0
                        logs = lanes.episode_logs(int(lane), state, names)
                        hooks.on_episode_end(int(lanes.episode[lane]), logs)
                if (quota is not None and not reported.any()) or (nb_episodes and nb_ended >= nb_episodes):
                    return False
            if interrupts.pressed:
                return True
            if agent.stop_training:
                return False
    return False
