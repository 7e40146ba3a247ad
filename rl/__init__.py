"""Deep reinforcement learning for Keras 3: agents, replay memories, policies and vector environments."""

__version__ = "0.1.0"
