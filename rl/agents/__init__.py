"""The agents."""

from rl.agents.dqn import DQNAgent

__all__ = ["DQNAgent"]
