"""The bases of the algorithms: `ReplayAgent` for those that replay, `RolloutAgent` for those that learn on-policy."""

from rl.agents.replay import ReplayAgent

__all__ = ["ReplayAgent"]
