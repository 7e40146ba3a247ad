"""The population of the cross-entropy method: who plays, who has been scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rl.util import RandomStream

OLD = -1  # the number of a member whose generation is over


class Population(RandomStream):
    """The search distribution, the members that play, and the generation's episodes so far.

    Attributes:
        theta: `(2, P)` float32: mean and standard deviation of the weights.
        best_seen: The highest return of an episode so far, and the weights `(P,)` of its member.
        members: `(N, P)`: the weights of each lane's member.
        returns: `(N,)`: their returns so far.
        numbers: `(N,)`: as the how-manieth of its generation each was drawn, or `OLD`.
        nb_drawn: Members drawn for this generation.
        scored: `(return, weights)` of its members whose episode has ended.
    """

    def __init__(self) -> None:
        self.theta = np.zeros((2, 0), np.float32)
        self.best_seen: tuple[float, Any] = (-np.inf, None)
        self.open(0)

    def open(self, nb_lanes: int) -> None:
        """Begins a generation on N lanes; members are still to be drawn."""
        self.members = np.zeros((nb_lanes, self.theta.shape[1]), np.float32)
        self.returns = np.zeros(nb_lanes)
        self.numbers = np.full(nb_lanes, OLD)
        self.nb_drawn = 0
        self.scored: list[tuple[float, Any]] = []

    def draw(self, lanes: Iterable[int]) -> None:
        """Draws new members for some lanes."""
        for lane in lanes:
            noise = self.rng.standard_normal(self.theta.shape[1], np.float32)
            self.members[lane] = self.theta[0] + self.theta[1] * noise
            self.returns[lane], self.numbers[lane] = 0.0, self.nb_drawn
            self.nb_drawn += 1

    def score(self, lane: int) -> np.ndarray:
        """Takes in the return of a lane's member, whose episode has ended; returns its weights."""
        score, member = float(self.returns[lane]), self.members[lane].copy()
        if self.numbers[lane] >= 0:
            self.scored.append((score, member))
        if score > self.best_seen[0]:
            self.best_seen = (score, member)
        return member

    def is_complete(self, size: int, nb_best: int) -> bool:
        """Whether the first `size` members have all been scored or lost, and `nb_best` are scored."""
        waited_for = (self.numbers >= 0) & (self.numbers < size)
        return self.nb_drawn >= size and not waited_for.any() and len(self.scored) >= nb_best

    def end_generation(self, nb_best: int) -> list[tuple[float, Any]]:
        """Returns `(return, weights)` of the best, best first; members that still play are of no generation now."""
        best = sorted(self.scored, key=lambda x: x[0], reverse=True)[:nb_best]
        self.scored, self.nb_drawn, self.numbers[:] = [], 0, OLD
        return best
