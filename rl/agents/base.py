"""The bases of the algorithms: `ReplayAgent` for those that replay, `RolloutAgent` for those that learn on-policy."""

from rl.agents.replay import ReplayAgent
from rl.agents.rollout import RolloutAgent

__all__ = ["ReplayAgent", "RolloutAgent"]
