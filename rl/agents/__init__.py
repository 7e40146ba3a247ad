"""The agents."""

from rl.agents.a2c import A2CAgent
from rl.agents.dqn import DQNAgent
from rl.agents.ppo import PPOAgent

__all__ = ["A2CAgent", "DQNAgent", "PPOAgent"]
