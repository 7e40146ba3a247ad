"""Agents without a network, shared by the tests: they make a test of the loop quick and its trace exact."""

import numpy as np

from rl.callbacks import Callback
from rl.core import Agent
from rl.util import RandomStream

HOOKS = (
    *("on_episode_begin", "on_episode_end", "on_step_begin", "on_step_end", "on_action_begin", "on_action_end"),
    *("on_train_begin", "on_train_end", "on_vector_step_end"),
)


class Record:
    """What happened; not a list, since Keras would wrap it."""

    def __init__(self):
        self.calls = []


class Noting(Agent):
    """Chooses random actions and notes its calls. Every `interval`-th `observe` in `fit` reports one metric."""

    def __init__(self, interval=1, nb_actions=3, **kwargs):
        super().__init__(**kwargs)
        self.record, self.dice = Record(), RandomStream()
        self.interval, self.nb_actions = interval, nb_actions
        self.compile()
        self.dice.get_random_state()

    @property
    def calls(self):
        return self.record.calls

    @property
    def metrics_names(self):
        return ["loss"]

    def random_streams(self):
        return [self.dice]

    def open_lanes(self, nb_lanes):
        self.calls.append(("open_lanes", nb_lanes))

    def act(self, observation):
        self.calls.append(("act", np.array(observation)))
        return self.dice.rng.integers(self.nb_actions, size=len(observation))

    def observe(self, transition):
        self.calls.append(("observe", transition))
        if not self.training:
            return None
        self.run_state.nb_updates += 1
        return np.array([float(self.step)]) if self.run_state.nb_updates % self.interval == 0 else None

    def transitions(self):
        return [what for name, what in self.calls if name == "observe"]


def recorder(calls, hooks=HOOKS):
    """A callback that appends `(hook, *arguments)` to `calls`."""

    def hook(name):
        return lambda self, *arguments: calls.append((name, *arguments))

    return type("Recorder", (Callback,), {name: hook(name) for name in hooks})()
