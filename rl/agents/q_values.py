"""What agents share whose network says the value of each discrete action."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rl.common.lane_processor import changes_actions
from rl.common.misc_util import tree_map
from rl.policy import EpsGreedyQPolicy, GreedyQPolicy, Policy
from rl.util import require


class QValues:
    """Mixin of agents on `GradientAgent` with a network of `nb_actions` Q-values, and policies over them."""

    nb_actions: int
    policy: Policy
    test_policy: Policy

    def _set_policies(self, policy: Any, test_policy: Any) -> None:
        self.policy = policy if policy is not None else EpsGreedyQPolicy()
        self.test_policy = test_policy if test_policy is not None else GreedyQPolicy()
        for name, p in (("policy", self.policy), ("test_policy", self.test_policy)):
            require(name, p, isinstance(p, Policy), "an instance of rl.policy.Policy")
            p._set_agent(self)

    def explore(self: Any, outputs: np.ndarray) -> np.ndarray:
        """The policy's actions for Q-values `(N, nb_actions)`: `policy` in `fit`, `test_policy` in `test`."""
        return (self.policy if self.training else self.test_policy).select_actions(outputs)

    def compute_q_values(self, state: Any) -> np.ndarray:
        """Q-values `(nb_actions,)` of one state, a list of `window_length` observations."""
        return self.compute_batch_q_values([state])[0]

    def compute_batch_q_values(self: Any, state_batch: Any) -> np.ndarray:
        """Q-values `(B, nb_actions)` of a batch of states, each a list of `window_length` observations."""
        states = [tree_map(lambda *frames: np.stack(frames), *state) for state in state_batch]
        return self.evaluate(tree_map(lambda *rows: np.stack(rows), *states))

    def check_spaces(self: Any, observation_space: Any, action_space: Any) -> None:
        """Q-learning chooses one of `nb_actions` discrete actions; see `GradientAgent.check_spaces`."""
        check_discrete(type(self).__name__, self.nb_actions, action_space, self.processor)


def check_discrete(owner: str, nb_actions: int, action_space: Any, processor: Any = None) -> None:
    """Raises where an env's actions are not `nb_actions` discrete ones.

    Args:
        owner: The agent's class name, for the message.
        nb_actions: The network's outputs.
        action_space: The env's; None, or anything without a size, passes.
        processor: The agent's. One with a `process_action` makes the env's actions of the indexes 0..nb_actions-1.

    Raises:
        ValueError: With what the env has, and what to change.
    """
    if changes_actions(processor):
        return
    if isinstance(action_space, gymnasium.Space) and not isinstance(action_space, gymnasium.spaces.Discrete):
        raise ValueError(
            f"{owner} chooses one of nb_actions discrete actions, the env's action space is {action_space}. Fix: an "
            "env with a Discrete space (gymnasium.wrappers.DiscretizeAction makes one of a Box), a processor whose "
            "process_action makes the env's actions of indexes, or an agent for continuous actions"
        )
    if getattr(action_space, "n", nb_actions) != nb_actions:
        raise ValueError(
            f"nb_actions={nb_actions}, but the env has {action_space.n} actions ({action_space}). "
            "Fix: nb_actions=env.action_space.n, and a network with that many outputs"
        )
