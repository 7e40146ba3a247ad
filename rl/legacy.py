"""keras-rl's contract: an agent is `forward`, which gives an action, and `backward`, which takes what followed.

Every agent can be driven that way by hand, and a class that overrides one of the two runs in `fit` and `test` on a
single env in keras-rl's order of calls (`KerasRLOrder`).
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from rl.common.misc_util import tree_map, warn_user
from rl.driver import Transition
from rl.loop import run
from rl.memory import Memory
from rl.util import require

# What a class overrides in keras-rl's contract, and what decides here instead where a class has that, too.
_CONTRACT = (("forward", "act"), ("backward", "observe"), ("reset_states", "observe"))


class Hand:
    """Where an agent that is driven by `forward` and `backward` stands, one of `RunState`'s slots.

    Attributes:
        opened: The value of `training` for which it was last driven by hand; None where `fit` or `test` drives.
        shown: `(1, *obs)`: what `forward` was given and `backward` has not answered.
        pending: The last step, whose next observation is not known yet, or None.
        is_open: Whether the episode has steps.
        ended: Whether the last step that is complete ended its episode.
        metrics: What `observe` reported since the last `backward`.
        over: Whether the env ended the episode with the running step.
        cut: Whether that is a truncation.
        is_last: Whether the pair of calls shows an episode's last observation: no step follows from it.
        filled: The observation and the action that were noted for a class that does not note them.
        warned: Whether the user was told that what was noted is not what was done.
    """

    __slots__ = (
        *("opened", "shown", "pending", "is_open", "ended", "metrics"),
        *("over", "cut", "is_last", "filled", "warned"),
    )

    def __init__(self, opened: bool | None = None):
        self.opened = opened
        self.shown: Any = None
        self.pending: Transition | None = None
        self.metrics: Any = None
        self.is_open = self.ended = self.over = self.cut = self.is_last = self.warned = False
        self.filled: dict[str, Any] = {}


class ForwardBackward:
    """Mixin of `Agent`: `forward` and `backward` are `act` and `observe` of one lane.

    A step is complete, and learnt from, when the next `forward` shows where it led. After the last step of an episode
    call `forward` and `backward(0., False)` once more, on its last observation, as keras-rl's `fit` did; it becomes no
    step. By hand a pair of calls with that reward after a terminal step is taken for this one, unless `reset_states`
    was called in between. An episode that you cut yourself: show its last observation with `forward`, then call
    `reset_states`.

    By hand set `agent.training = True` to learn. Several agents may share an env this way, turn by turn.
    """

    def forward(self: Any, observation: Any) -> Any:
        """Chooses an action for one observation, `(*obs)`; the last step is complete by now, and learnt from."""
        action = _show(self, observation)
        self.run_state.recent_observation, self.run_state.recent_action = observation, action
        return action

    def backward(self: Any, reward: float, terminal: bool = False) -> list[float]:
        """Takes in what followed `recent_action` in `recent_observation`; by hand it counts the step, too.

        Args:
            reward: The reward of the action.
            terminal: Whether the episode ended. In `fit` this is so for a time limit as well, as in keras-rl; which of
                the two it was is known here, and a time limit is stored as such. By hand it means that the episode
                terminated.

        Returns:
            One value per `metrics_names`, of what was learnt since the last call; NaN without an update.

        Raises:
            RuntimeError: Nothing was shown to the agent before.
            ValueError: The reward is NaN or infinite.
        """
        state, hand = self.run_state, _hand(self)
        require("reward", reward, bool(np.isfinite(reward)), "finite")
        if hand.shown is None:  # an overridden forward() chose without this class
            if state.recent_observation is None:
                raise RuntimeError("backward() was called before forward() showed an observation to the agent")
            _show(self, state.recent_observation)
        rows, hand.shown = hand.shown, None
        metrics, hand.metrics = hand.metrics, None
        if isinstance(memory := getattr(self, "memory", None), Memory):  # for classes that ask get_recent_state()
            memory.append(state.recent_observation, state.recent_action, reward, bool(terminal), training=False)
        by_hand = self._running is None
        is_last = hand.is_last or (by_hand and hand.ended and not reward and not terminal)
        hand.ended = False
        if not is_last:
            terminated = bool(terminal) and not hand.cut
            flags = (np.array([terminated]), np.array([hand.over and not terminated]), np.ones(1, bool))
            action, rewards = np.asarray(state.recent_action)[None], np.array([reward], np.float32)
            hand.pending, hand.is_open = Transition(rows, action, rewards, rows, *flags, [{}]), True
            state.step += by_hand and state.training
        return [float("nan")] * len(self.metrics_names) if metrics is None else [float(m) for m in metrics]

    def reset_states(self: Any) -> None:
        """Forgets the open episode of an agent that is driven by `forward` and `backward`, which is cut there."""
        state, hand = self.run_state, self.run_state.hand
        if self._running is None and hand is not None and hand.opened == state.training:
            if hand.pending is not None and hand.pending.terminated[0]:
                _complete(self, hand.pending.observation)
            elif hand.is_open:
                state.step -= hand.pending is not None and state.training  # nobody knows where it led
                rows, action = hand.shown, np.asarray(state.recent_action)[None]
                if hand.pending is not None:
                    rows, action = hand.pending.observation, hand.pending.action
                no, yes = np.zeros(1, bool), np.ones(1, bool)
                self.observe(Transition(rows, action, np.zeros(1, np.float32), rows, no, yes, no, [{}]))
            hand.pending = hand.shown = None
            hand.is_open = hand.ended = False
        state.recent_observation = state.recent_action = None

    @property
    def recent_observation(self: Any) -> Any:
        """What `forward` was given last."""
        return self.run_state.recent_observation

    @recent_observation.setter
    def recent_observation(self: Any, value: Any) -> None:
        self.run_state.recent_observation = value

    @property
    def recent_action(self: Any) -> Any:
        """What `forward` answered last: the action that `backward` learns from."""
        return self.run_state.recent_action

    @recent_action.setter
    def recent_action(self: Any, value: Any) -> None:
        self.run_state.recent_action = value

    def process_state_batch(self: Any, batch: Any) -> Any:
        """A batch of states, `(B, W, *obs)`, as the processor makes it."""
        batch = np.array(batch)
        return batch if self.processor is None else self.processor.process_state_batch(batch)

    def _on_train_begin(self) -> None:
        """Called when `fit` begins, before the callbacks."""

    def _on_train_end(self) -> None:
        """Called when `fit` ends, after the callbacks."""

    def _on_test_begin(self) -> None:
        """Called when `test` begins, before the callbacks."""

    def _on_test_end(self) -> None:
        """Called when `test` ends, after the callbacks."""

    def begin_episodes(self) -> None:
        """Called by the loop where episodes began, after the hooks of the episodes."""

    def end_episodes(self) -> None:
        """Called by the loop where episodes ended, between the hooks of the step and those of the episodes."""

    def _make_functions(self) -> None:
        """Compiles what `act` and `observe` need; here nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Keras makes its own dicts of dicts; a table of Q-values with defaults would lose them."""
        if _has_defaults(value):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def _hand(agent: Any) -> Hand:
    """An agent's hand; by hand with a lane of its own."""
    state = agent.run_state
    if agent._running is not None:
        if state.hand is None or state.hand.opened is not None:
            state.hand = Hand()
    elif state.hand is None or state.hand.opened != state.training:
        agent._make_functions()
        agent._lanes = None  # a next fit begins new episodes
        agent.open_lanes(1)
        state.hand = Hand(state.training)
    return state.hand


def _show(agent: Any, observation: Any) -> Any:
    """Completes the last step by where it led, and asks for an action there."""
    state, hand = agent.run_state, _hand(agent)
    if isinstance(observation, list) and any(isinstance(part, np.ndarray) for part in observation):
        observation = tuple(observation)
    rows = tree_map(lambda x: np.array(x)[None], observation)
    if hand.pending is not None:
        _complete(agent, rows)
    training, hand.shown = state.training, rows
    try:
        state.training = training and not hand.is_last  # nothing is done there: no exploration, no random number
        return agent.act(rows)[0]
    finally:
        state.training = training


def _complete(agent: Any, next_observation: Any) -> None:
    hand = agent.run_state.hand
    row, hand.pending = hand.pending._replace(next_observation=next_observation), None
    hand.ended = bool(row.terminated[0] or row.truncated[0])
    hand.is_open = not hand.ended
    hand.metrics = agent.observe(row)


class KerasRLOrder:
    """Stands for an agent in the loop, and makes keras-rl's calls, in keras-rl's order.

    Of a step: `forward(observation)`, the env's step, `backward(reward, terminal=...)`. At the end of an episode, after
    the callbacks' `on_step_end`: `forward(last observation)`, `backward(0., terminal=False)`. When one begins:
    `reset_states()`. `agent.step` is counted after `backward`.
    """

    def __init__(self, agent: Any):
        self._agent = agent
        self._last: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def begin_episodes(self) -> None:
        """`reset_states`; see `ForwardBackward.begin_episodes`."""
        self._agent.reset_states()

    def act(self, observation: Any) -> np.ndarray:
        """`forward`; see `Agent.act`."""
        agent, hand = self._agent, _hand(self._agent)
        action = self._forward(observation)
        if not hand.warned and not np.array_equal(agent.recent_action, action):
            hand.warned = True
            warn_user(
                f"{type(agent).__name__}.forward() returned {action}, but agent.recent_action, which backward() learns "
                f"from, is {agent.recent_action}. Fix, unless that is meant: set self.recent_action before returning"
            )
        return action[None]

    def _forward(self, observation: Any) -> np.ndarray:
        """What `forward` answers for the one row; it is noted where the class does not do so."""
        agent, hand = self._agent, _hand(self._agent)
        row = tree_map(lambda x: x[0].copy(), observation)
        action = agent.forward(row)
        if action is None:
            raise TypeError(f"{type(agent).__name__}.forward() returned None, it must return the action")
        for name, value in (("recent_observation", row), ("recent_action", np.array(action))):
            noted = getattr(agent, name)
            if noted is None or noted is hand.filled.get(name):
                setattr(agent, name, value)
                hand.filled[name] = value
        return np.asarray(action)

    def observe(self, transition: Any) -> np.ndarray | None:
        """`backward`; see `Agent.observe`."""
        agent, state, hand = self._agent, self._agent.run_state, _hand(self._agent)
        terminated = bool(transition.terminated[0])
        hand.cut = bool(transition.truncated[0]) and not terminated
        hand.over = terminated or hand.cut
        self._last = transition.next_observation
        state.step -= 1  # the loop has counted it already
        try:
            return self._values(agent.backward(float(transition.reward[0]), terminal=hand.over))
        finally:
            state.step += 1
            hand.over = hand.cut = False

    def end_episodes(self) -> None:
        """The pair of calls on the last observation; see `ForwardBackward.end_episodes`."""
        agent, state, hand = self._agent, self._agent.run_state, _hand(self._agent)
        nb_updates, hand.is_last = state.nb_updates, True
        try:
            self._forward(self._last)
            metrics = agent.backward(0.0, terminal=False)
        finally:
            hand.is_last = False
        state.add(self._values(metrics), nb_updates)

    def _values(self, metrics: Any) -> np.ndarray | None:
        names = self._agent.metrics_names
        if metrics is None or not names:  # values without a name are not logged
            return None
        values = np.atleast_1d(np.asarray(metrics, np.float64))
        if len(values) < len(names):
            raise ValueError(
                f"{type(self._agent).__name__}.backward() returned {len(values)} values for metrics_names={names}; "
                "return one per name, or None"
            )
        return values[: len(names)]


def run_agent(agent: Any, lanes: Any, hooks: Any, **limits: Any) -> bool:
    """`rl.loop.run`, for a class that overrides keras-rl's contract in keras-rl's order of calls."""
    if not _overridden(type(agent)):
        return run(agent, lanes, hooks, **limits)
    memory, recent = getattr(agent, "memory", None), ("recent_observations", "recent_terminals")
    kept = {name: getattr(memory, name) for name in recent if not agent.training and hasattr(memory, name)}
    try:
        for name, frames in kept.items():  # the frames of a test never touch the training's
            setattr(memory, name, copy.copy(frames))
        order: Any = KerasRLOrder(agent)
        return run(order, lanes, hooks, **limits)
    finally:
        for name, frames in kept.items():
            setattr(memory, name, frames)


def check_lanes(agent: Any, driver: Any) -> None:
    """Raises `TypeError` where a class that overrides keras-rl's contract is to act in a vector env, or is half done.

    Args:
        agent: The agent.
        driver: The `EnvDriver`.
    """
    names = " and ".join(f"{name}()" for name in _overridden(type(agent)))
    if not names:
        return
    owner = type(agent).__name__
    for half, other, signature in (("forward", "act", "observation"), ("backward", "observe", "reward, terminal")):
        if not _has(agent, half) and not _has(agent, other):
            raise TypeError(f"{owner} overrides {names}, and must implement {half}({signature}), too")
    if driver.is_vector:
        more = [name for name in ("explore(outputs)", "loss_fn(batch)") if hasattr(agent, name.split("(")[0])]
        instead = f", or override {' and '.join(more)} instead" if more else ""
        raise TypeError(
            f"{owner} overrides {names}, keras-rl's way of acting in one env; this is a vector env of "
            f"{driver.nb_lanes}. Fix: implement act(observation) and observe(transition), for N lanes{instead} "
            "(docs/writing_an_agent.md)"
        )


def _overridden(cls: type) -> list[str]:
    """The methods of keras-rl's contract that a class overrides, and that decide: its `act` and `observe` are older."""

    def age(name: str) -> int:
        return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

    return [old for old, new in _CONTRACT if age(old) < age(new)]


def _has(agent: Any, name: str) -> bool:
    """Whether an agent has a method from elsewhere than the base class `rl.core.Agent`."""
    owner = next(base for base in type(agent).__mro__ if name in vars(base))
    return owner.__module__ not in ("rl.core", __name__)


def _has_defaults(value: Any) -> bool:
    if isinstance(value, (defaultdict, Counter)):
        return True
    if type(value) in (list, tuple, dict):
        return any(map(_has_defaults, value.values() if type(value) is dict else value))
    return False
