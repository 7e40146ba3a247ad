"""Deep reinforcement learning on Keras 3.

Importing this package is cheap on purpose: it loads neither Keras nor a backend, since every worker process
of a vectorised environment imports it. Agents live in `rl.agents`, vectorised environments in `rl.common`.
"""

__version__ = "0.1.0"
