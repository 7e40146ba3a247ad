"""`ReplayAgent`: when to learn from a replay memory, how often, and when the target networks move."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.agents.gradient import GradientAgent
from rl.common.misc_util import tree_leaves, tree_map
from rl.frames import RecentFrames
from rl.memory import Batch
from rl.networks import check_fit
from rl.ops import entry, polyak, weights_of
from rl.util import require


class ReplayAgent(GradientAgent):
    """An agent that learns from a replay memory: off-policy, on any number of lanes.

    A subclass sets `self.model`, its policy network, and implements `targets`, `loss_fn` (or `train_step`) and
    `explore`. All intervals are env steps summed over lanes and over the agent's life, so that the number of lanes
    changes neither the replay ratio nor any schedule.

    Args:
        nb_actions: Number of discrete actions, or of action components.
        memory: A `SequentialMemory`.
        gamma: Discount factor, in [0, 1].
        batch_size: Transitions per gradient step.
        nb_steps_warmup: Env steps before the first gradient step.
        train_interval: Env steps per gradient step. One step of 8 lanes is 8 env steps: 8 gradient steps at 1.
        memory_interval: Each lane stores every this many of its steps, so one in this many is stored in all.
        target_model_update: At least 1: the targets are copied every this many env steps. Below 1: they move by this
            factor after each gradient step, `target <- (1 - tau) target + tau source`.
        delta_range: Deprecated, keras-rl's old `(-x, x)`: use `delta_clip=x`.
        delta_clip: Where Huber's loss turns linear: the bound of the TD error's gradient. Default: never.
        custom_model_objects: Names to classes, for copies of networks with layers that are not registered with Keras.
        processor: A `Processor`.
        **kwargs: Passed to `Agent`.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    can_overlap = True

    def __init__(
        self,
        nb_actions: int,
        memory: Any,
        gamma: float = 0.99,
        batch_size: int = 32,
        nb_steps_warmup: int = 1000,
        train_interval: int = 1,
        memory_interval: int = 1,
        target_model_update: float = 10000,
        delta_range: tuple[float, float] | None = None,
        delta_clip: float = np.inf,
        custom_model_objects: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if delta_range is not None:
            warnings.warn(f"delta_range is deprecated; use delta_clip={delta_range[1]}", DeprecationWarning, 3)
            delta_clip = delta_range[1]
        require("gamma", gamma, 0 <= gamma <= 1, "in [0, 1]")
        require("target_model_update", target_model_update, target_model_update > 0, "positive")
        require("delta_clip", delta_clip, delta_clip > 0, "positive")
        require("nb_steps_warmup", nb_steps_warmup, nb_steps_warmup >= 0, "at least 0")
        counts = {"batch_size": batch_size, "train_interval": train_interval, "memory_interval": memory_interval}
        for name, value in (counts | {"nb_actions": nb_actions}).items():
            require(name, value, int(value) == value and value >= 1, "a whole number of at least 1")
        storing = hasattr(memory, "sample_batch") and not isinstance(memory, type)
        require("memory", memory, storing, "an instance of rl.memory.SequentialMemory")
        super().__init__(**kwargs)
        self.nb_actions = int(nb_actions)
        self.memory = memory
        self.gamma = float(gamma)
        self.batch_size = int(batch_size)
        self.nb_steps_warmup = int(nb_steps_warmup)
        self.train_interval = int(train_interval)
        self.memory_interval = int(memory_interval)
        self.target_model_update = target_model_update
        self.delta_clip = float(delta_clip)
        self.custom_model_objects = dict(custom_model_objects or {})
        self._ahead = LookAhead()

    # ---- what an algorithm implements -------------------------------------------------------------------------

    def targets(self) -> list[tuple[Any, Any]]:
        """The pairs `(target network, source network)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement targets()")

    def explore(self, outputs: np.ndarray) -> np.ndarray:
        """Chooses actions from the policy network's outputs, `(N, ...)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement explore(outputs)")

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """One gradient step on `loss_fn`, and the soft target update; compiled."""
        logs = self.gradient_step(batch)
        if self.target_model_update < 1:
            polyak(*weights_of(self.targets()), tau=self.target_model_update)
        return logs

    # ---- set-up -------------------------------------------------------------------------------------------------

    def prepare(self, driver: Any, observation: Any) -> None:
        """Checks that env, network and memory fit, and makes the compiled functions; see `Agent.prepare`."""
        self.check_spaces(driver.observation_space, driver.action_space)
        self.check_states(self._example_states(observation, self.memory.window_length))
        self._make_functions()

    def check_states(self, states: Any) -> None:
        """Raises `ValueError` where a network cannot take an env's states `(N, W, *obs)`; by default the policy's."""
        for network in (self.model, *[target for target, source in self.targets() if source is self.model]):
            check_fit(network, states, self.nb_actions, type(self).__name__)

    def set_weights(self, weights: list[Any]) -> None:
        """Sets all weights, as `keras.Model` does."""
        super().set_weights(weights)
        self._ahead.forget()  # what the old weights said

    def load_weights(self, filepath: Any) -> None:
        """Reads what `save_weights` wrote, into the networks and their targets; see `SavedAgent.load_weights`."""
        super().load_weights(filepath)
        self._ahead.forget()  # what the old weights said
        self.copy_to_targets()

    def copy_to_targets(self) -> None:
        """Copies the networks' weights into their target networks."""
        for target, source in self.targets():
            target.set_weights(source.get_weights())

    def open_lanes(self, nb_lanes: int) -> None:
        """Closes all open windows, and sizes the compiled loop for `nb_lanes`."""
        if self.training:
            self._ahead.forget()
            self.memory.begin_lanes(nb_lanes)
            self.run_state.windows = self.memory
        else:  # the frames of a test never touch the training's
            self.run_state.windows = RecentFrames(self.memory.window_length)
            self.run_state.windows.begin(nb_lanes)
        self.run_state.lane_steps = np.zeros(nb_lanes, np.int64)

    def random_streams(self) -> list[Any]:
        """Exploration, test policy and memory; see `Agent.random_streams`."""
        candidates = (getattr(self, "policy", None), getattr(self, "test_policy", None), self.memory)
        return [c for c in candidates if hasattr(c, "get_random_state")]

    def _make_functions(self) -> None:
        if self._functions is None:
            super()._make_functions()
            made: Any = self._functions
            self._functions = None
            self.memory.attach(made[0], self.variables, self.processor)  # which may refuse
            self._functions = made

    def _functions_to_compile(self) -> list[Callable]:
        return [self.call, self._train, lambda: polyak(*weights_of(self.targets()), tau=1)]

    # ---- acting -------------------------------------------------------------------------------------------------

    def act(self, observation: Any) -> np.ndarray:
        """Looks up the lanes' windows, evaluates the policy network once, explores; see `Agent.act`."""
        if self.run_state.overlap:
            self.run_state.acted_on = observation
        ahead = self._ahead
        if ahead.observation is None or ahead.observation is not observation or not self.training:
            return self.explore(self.evaluate(self._states(observation)))
        return self.explore(ahead.outputs)

    def _states(self, observation: Any) -> Any:
        windows = self.run_state.windows
        return windows.get_recent_states(observation) if windows is self.memory else windows.states(observation)

    # ---- learning -----------------------------------------------------------------------------------------------

    def observe(self, transition: Any) -> np.ndarray | None:
        """Stores the rows and takes the gradient steps that are due; see `Agent.observe`."""
        state, store = self.run_state, None
        if self.memory_interval > 1:
            store = state.lane_steps % self.memory_interval == 0
            state.lane_steps += transition.valid
        if not state.training:
            keep = transition.valid if store is None else transition.valid & store  # windows as in training
            closes = not self.memory.ignore_episode_boundaries
            ended = (transition.terminated | transition.truncated) & closes
            state.windows.push(transition.observation, keep, ended)
            return None
        self.memory.extend(transition, store)
        if state.overlap:
            return None
        nb_steps = int(np.count_nonzero(transition.valid))
        following = transition.next_observation

        def ahead() -> Any:
            # Where an episode ended the look-ahead is not used: these states are seen again, or never acted on.
            goes_on = self.processor is None or not (transition.terminated | transition.truncated).any()
            return self._processed(self._states(following), counts=goes_on)

        metrics = self._learn(state.step - nb_steps, len(transition.valid), ahead)
        if metrics is not None:
            # Where no episode ended the driver hands out this very object as the next observation.
            self._ahead.observation = following
        return metrics

    def learn(self) -> np.ndarray | None:
        """Takes the gradient steps that are due for the steps stored since the last call; see `Agent.learn`."""
        state = self.run_state
        # Nobody knows the next observations yet: the look-ahead is given those of the running step, and not used.

        def ahead() -> Any:
            return self._processed(self._states(state.acted_on), counts=False)

        metrics = self._learn(state.learnt, len(state.lane_steps), ahead)
        state.learnt = state.step
        self._ahead.forget()
        return metrics

    def _learn(self, before: int, nb_lanes: int, next_states: Callable[[], Any]) -> np.ndarray | None:
        """Takes the gradient steps owed for the env steps after `before`, and the hard target copies among them."""
        state = self.run_state
        self._ahead.forget()
        # A loaded agent is past its warm-up, but its memory is empty: no update before it holds a batch, and none after
        # for the steps until then.
        warm = min(self.batch_size, self.nb_steps_warmup // self.memory_interval)
        if self.memory.nb_entries < max(1, warm):
            return None
        first = max(before, self.nb_steps_warmup)
        state.owed += max(0, state.step // self.train_interval - first // self.train_interval)
        # A constant upper bound, so that a varying number of updates owed never compiles anew.
        kmax = max(self.steps_per_execution, -(-nb_lanes // self.train_interval))
        total, nb_updates, states = np.zeros(0), 0, None
        while state.owed >= self.steps_per_execution:
            k = min(state.owed, kmax)
            states = next_states() if states is None else states
            metrics = k * self._update(k, kmax, states)
            total = total + metrics if nb_updates else metrics
            nb_updates += k
            state.owed -= k
        interval = self.target_model_update
        if interval >= 1 and state.step // interval > before // interval:
            self._functions[2]()
        if nb_updates == 0:
            return None
        return self._with_logged(total / nb_updates)

    def _update(self, k: int, kmax: int, next_states: Any) -> np.ndarray:
        """Takes k gradient steps in one compiled call, which looks ahead to the next action, too."""
        batch = self.memory.sample_batch(self.batch_size, k=k, gamma=self.gamma)
        if self.processor is not None:
            batch = batch._replace(state0=self._processed(batch.state0, 2), state1=self._processed(batch.state1, 2))
        fields = tuple(batch)[:-1]  # the index stays here
        if k < kmax:
            fields = tree_map(lambda x: np.concatenate([x, np.zeros((kmax - k, *x.shape[1:]), x.dtype)]), fields)
        self._make_functions()
        metrics, outputs = self._functions[1](fields, np.int32(k), next_states)
        self.run_state.nb_updates += k
        self._check_finite(metrics[0], "delta_clip=1., a smaller learning_rate, optimizer clipnorm")
        self._ahead.outputs = outputs
        return metrics

    def _train(self, fields: tuple, n: Any, next_states: Any) -> tuple[Any, Any]:
        """Compiled: n gradient steps on batches with a leading axis k, then the network's outputs for the next states.

        Returns:
            `(metrics, outputs)`: the means over the n steps, and what `call` gives with the new weights.
        """

        def batch_at(i: Any) -> Batch:
            return self.memory.resolve(Batch._make([*tree_map(lambda x: entry(x, i), fields), None]))

        metrics, _ = self.gradient_steps(n, tree_leaves(fields)[0].shape[0], batch_at)
        return metrics, self.call(next_states)


class LookAhead:
    """The policy network's outputs for the next observations, where the last gradient steps gave them.

    An object of its own, since Keras looks at every assignment to an agent, which costs as much as a small network.

    Attributes:
        observation: The observations, the very object that `act` will be given; None: there are none.
        outputs: What `call` gives for them.
    """

    __slots__ = ("observation", "outputs")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There are no outputs for what comes next."""
        self.observation = self.outputs = None
