"""The agents."""

from rl.agents.a2c import A2CAgent
from rl.agents.cem import CEMAgent
from rl.agents.ddpg import DDPGAgent
from rl.agents.dqn import DQNAgent
from rl.agents.naf import ContinuousDQNAgent, NAFAgent, NAFLayer
from rl.agents.ppo import PPOAgent
from rl.agents.sac import SACAgent
from rl.agents.sarsa import SARSAAgent, SarsaAgent
from rl.agents.td3 import TD3Agent

__all__ = [
    "A2CAgent",
    "CEMAgent",
    "ContinuousDQNAgent",
    "DDPGAgent",
    "DQNAgent",
    "NAFAgent",
    "NAFLayer",
    "PPOAgent",
    "SACAgent",
    "SARSAAgent",
    "SarsaAgent",
    "TD3Agent",
]
