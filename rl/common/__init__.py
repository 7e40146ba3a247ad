"""Helpers shared by environments, examples and agents: no Keras, no backend."""
