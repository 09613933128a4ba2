"""The cheapest way to hold what a model saves within what memory there is: one option for each site.

Added time is that of the slowest rank: what its options take, and of what they move what does not fit beside
the computation. Exact by branch and bound; the bounds are those of Lagrange multipliers, one for each limit
and channel (Fisher, The Lagrangian relaxation method for solving integer programming problems, 1981). Where
the search is cut short, the answer says how far it may be from the best.

Letters: S sites, O options of a site, K limits, R ranks, C channels. Needs numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

STEPS, FEW_STEPS = 100, 20
"""Subgradient steps; few where nothing is to be proved."""
MOST_NODES = 20_000
"""Partial choices that are looked at, about a second."""


@dataclass(frozen=True)
class Option:
    """One way to hold a site's tensors."""

    name: str
    uses: tuple[float, ...]
    """Of each limit."""
    seconds: tuple[float, ...]
    """Added to each rank's step."""
    moves: tuple[float, ...]
    """Seconds for which each channel is busy."""


@dataclass(frozen=True)
class Problem:
    """Options of each site, and what they share."""

    sites: tuple[tuple[Option, ...], ...]
    limits: tuple[float, ...]
    channel_ranks: tuple[int, ...]
    """Whose step a channel's overflow adds to."""
    free: tuple[float, ...]
    """Seconds for which each channel costs nothing: computation goes on beside it."""


@dataclass(frozen=True)
class Answer:
    """Options by site, and their cost."""

    choice: tuple[int, ...]
    seconds: float
    bound: float
    """No choice costs less."""

    @property
    def is_proved(self) -> bool:
        """Whether none is better."""
        return self.seconds <= self.bound * (1 + 1e-9) + 1e-12


def cost(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds added to the slowest rank's step."""
    chosen = [options[index] for options, index in zip(problem.sites, choice, strict=True)]
    spent = [sum(option.seconds[rank] for option in chosen) for rank in range(_ranks(problem))]
    for channel, (rank, free) in enumerate(zip(problem.channel_ranks, problem.free, strict=True)):
        spent[rank] += max(0.0, sum(option.moves[channel] for option in chosen) - free)
    return max(spent, default=0.0)


def fits(problem: Problem, choice: Sequence[int]) -> bool:
    """Whether a choice keeps within every limit."""
    chosen = [options[index] for options, index in zip(problem.sites, choice, strict=True)]
    return all(
        sum(option.uses[k] for option in chosen) <= limit * (1 + 1e-12)
        for k, limit in enumerate(problem.limits)
    )


def least(problem: Problem) -> tuple[int, ...]:
    """The choice that uses least of the limit that is hardest to keep."""
    hardest = max(
        range(len(problem.limits)),
        key=lambda k: sum(min(o.uses[k] for o in options) for options in problem.sites) - problem.limits[k],
    )
    return tuple(
        min(range(len(options)), key=lambda index: options[index].uses[hardest]) for options in problem.sites
    )


def search(problem: Problem, *, below: float = np.inf, most_nodes: int = MOST_NODES) -> Answer | None:
    """The cheapest choice within the limits; None where there is none that costs less than `below`."""
    return _Search(problem, below).run(most_nodes)


def _ranks(problem: Problem) -> int:
    return len(problem.sites[0][0].seconds) if problem.sites else 0


@dataclass
class _Multipliers:
    limits: np.ndarray
    """>= 0, [K]."""
    channels: np.ndarray
    """Of 0 to 1 times the rank's, [C]."""
    ranks: np.ndarray
    """>= 0 and 1 in all, [R]."""


@dataclass
class _Site:
    """A site's options that are worth a look, dearest limits first scaled to 1."""

    index: int
    kept: list[int]
    uses: np.ndarray  # [O, K]
    seconds: np.ndarray  # [O, R]
    moves: np.ndarray  # [O, C]
    prices: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [O]


class _Search:
    def __init__(self, problem: Problem, below: float) -> None:
        self.problem = problem
        self.scale = np.maximum(np.abs(np.array(problem.limits)), 1.0)
        self.limits = np.array(problem.limits) / self.scale * (1 + 1e-12)
        self.free, self.of = np.array(problem.free), np.array(problem.channel_ranks, dtype=int)
        self.rank_of = np.eye(_ranks(problem))[self.of]  # [C, R]
        self.sites = [self._site(index, options) for index, options in enumerate(problem.sites)]
        self.tried: set[tuple[int, ...]] = set()
        self.best: float = below
        self.choice: tuple[int, ...] | None = None
        self.nodes = 0

    def _site(self, index: int, options: Sequence[Option]) -> _Site:
        uses = np.array([option.uses for option in options]).reshape(len(options), -1) / self.scale
        seconds = np.array([option.seconds for option in options])
        moves = np.array([option.moves for option in options]).reshape(len(options), -1)
        kept = _undominated(np.concatenate((uses, seconds, moves), axis=1))
        return _Site(index, kept, uses[kept], seconds[kept], moves[kept])

    def run(self, most_nodes: int) -> Answer | None:
        if not self.problem.sites:
            return Answer((), 0.0, 0.0) if (self.limits >= 0).all() else None
        if any(
            sum(site.uses[:, k].min() for site in self.sites) > self.limits[k]
            for k in range(len(self.limits))
        ):
            return None
        parts = ("uses", "seconds", "moves")
        self.stacked = [np.concatenate([getattr(site, part) for site in self.sites]) for part in parts]
        multipliers = self._ascend(STEPS if most_nodes else FEW_STEPS)
        bound = self._price(multipliers)
        # Sites whose options differ most are decided first.
        self.sites.sort(key=lambda site: -float(np.ptp(site.prices)))
        self._tails()
        proved = self._branch(most_nodes)
        if self.choice is None:
            return None
        return Answer(self.choice, self.best, self.best if proved else min(bound, self.best))

    # Bounds

    def _price(self, multipliers: _Multipliers) -> float:
        """Price every option; the bound that the prices give."""
        channels = multipliers.channels * multipliers.ranks[self.of]
        for site in self.sites:
            site.prices = (
                site.seconds @ multipliers.ranks + site.moves @ channels + site.uses @ multipliers.limits
            )
        self.offset = -float(channels @ self.free + multipliers.limits @ self.limits)
        return sum(float(site.prices.min()) for site in self.sites) + self.offset

    def _ascend(self, steps: int) -> _Multipliers:
        """Multipliers whose bound is about the highest; tries what they choose on the way."""
        ranks = _ranks(self.problem)
        now = _Multipliers(
            np.zeros(len(self.limits)), np.full(len(self.free), 0.5), np.full(ranks, 1 / ranks)
        )
        best, highest = now, -np.inf
        for step in range(steps):
            bound = self._price(now)
            if bound > highest:
                best, highest = now, bound
            picks = [int(site.prices.argmin()) for site in self.sites]
            self._try(picks)
            now = self._step(now, picks, bound, step)
        return best

    def _step(self, now: _Multipliers, picks: list[int], bound: float, step: int) -> _Multipliers:
        uses, seconds, moves = self._sums(picks)
        over, overflow = uses - self.limits, moves - self.free
        target = self.best if np.isfinite(self.best) else max(abs(bound), 1e-9) * 1.5 + 1e-6
        norm = float(over @ over) or 1.0
        pace = max(target - bound, 1e-6 * abs(target)) / norm / (1 + step / 30)
        spent = seconds + np.bincount(self.of, np.maximum(overflow, 0), minlength=len(seconds))
        shares = now.ranks * np.exp(0.5 / (1 + step / 10) * spent / max(float(spent.max()), 1e-30))
        return _Multipliers(
            np.maximum(0, now.limits + pace * over),
            np.clip(now.channels + 0.3 / (1 + step / 20) * np.sign(overflow), 0, 1),
            shares / shares.sum(),
        )

    # Choices

    def _sums(self, picks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pairs = list(zip(self.sites, picks, strict=True))
        return (
            sum(site.uses[pick] for site, pick in pairs),  # type: ignore[return-value]
            sum(site.seconds[pick] for site, pick in pairs),
            sum(site.moves[pick] for site, pick in pairs),
        )

    def _cost(self, seconds: np.ndarray, moves: np.ndarray) -> np.ndarray:
        """Of seconds [..., R] and moves [..., C]."""
        overflow = np.maximum(moves - self.free, 0) @ self.rank_of
        return (seconds + overflow).max(axis=-1)  # type: ignore[no-any-return]

    def _try(self, picks: list[int]) -> None:
        """Mend a choice until it fits, then improve it one site at a time; keep it if it is the best."""
        if tuple(picks) in self.tried:
            return
        self.tried.add(tuple(picks))
        counts = [len(site.kept) for site in self.sites]
        firsts = np.cumsum([0, *counts[:-1]])
        owner = np.repeat(np.arange(len(counts)), counts)
        now = firsts + np.array(picks)
        for _ in range(4 * len(counts)):
            swap = self._best_swap(now, owner)
            if swap is None:
                break
            now[owner[swap]] = swap
        uses = self.stacked[0][now].sum(axis=0)
        if (uses <= self.limits).all():
            seconds, moves = (part[now].sum(axis=0) for part in self.stacked[1:])
            self._record([int(pick) for pick in now - firsts], float(self._cost(seconds, moves)))

    def _best_swap(self, now: np.ndarray, owner: np.ndarray) -> int | None:
        """The option, numbered over all sites, to take next in place of its site's; None: none."""
        uses, seconds, moves = (part[now].sum(axis=0) + part - part[now[owner]] for part in self.stacked)
        left = np.maximum(uses - self.limits, 0).sum(axis=1)
        price = self._cost(seconds, moves)
        over, here = left[now[0]], price[now[0]]
        if over > 0:
            gain = np.maximum(over - left, 1e-300)
            rank = np.where(left < over * (1 - 1e-12), (price - here) / gain, np.inf)
            return int(rank.argmin()) if np.isfinite(rank.min()) else None
        rank = np.where(left == 0, price - here, np.inf)
        return int(rank.argmin()) if rank.min() < -1e-15 else None

    def _record(self, picks: Sequence[int], price: float) -> None:
        if price < self.best or (self.choice is None and price <= self.best):
            self.best = price
            pairs = zip(self.sites, picks, strict=True)
            found = {site.index: site.kept[pick] for site, pick in pairs}
            self.choice = tuple(found[index] for index in range(len(found)))

    # Branches

    def _tails(self) -> None:
        """Of the sites from each one on: least price and least use of each limit."""
        prices, uses = [0.0], [np.zeros(len(self.limits))]
        for site in reversed(self.sites):
            prices.append(prices[-1] + float(site.prices.min()))
            uses.append(uses[-1] + site.uses.min(axis=0))
        self.tail_prices, self.tail_uses = prices[::-1], uses[::-1]

    def _branch(self, most_nodes: int) -> bool:
        """Look at every choice that may be better than the best one; False: not at all of them."""
        ranks, channels, limits = _ranks(self.problem), len(self.free), len(self.limits)
        start = (0, self.offset, np.zeros(limits), np.zeros(ranks), np.zeros(channels), ())
        stack: list[tuple[int, float, np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]] = [start]
        while stack:
            depth, price, uses, seconds, moves, picks = stack.pop()
            if not self._may_win(depth, price, seconds, moves):
                continue
            if depth == len(self.sites):
                self._record(picks, float(self._cost(seconds, moves)))
                continue
            self.nodes += 1
            if self.nodes > most_nodes:
                return False
            site = self.sites[depth]
            for pick in np.argsort(-site.prices):
                after = uses + site.uses[pick]
                if (after + self.tail_uses[depth + 1] <= self.limits).all():
                    stack.append(
                        (
                            depth + 1,
                            price + float(site.prices[pick]),
                            after,
                            seconds + site.seconds[pick],
                            moves + site.moves[pick],
                            (*picks, int(pick)),
                        )
                    )
        return True

    def _may_win(self, depth: int, price: float, seconds: np.ndarray, moves: np.ndarray) -> bool:
        margin = self.best - 1e-12 - 1e-9 * abs(self.best) if np.isfinite(self.best) else np.inf
        return price + self.tail_prices[depth] < margin and bool(self._cost(seconds, moves) < margin)


def _undominated(values: np.ndarray) -> list[int]:
    """Rows [O, ...] that no other is at most equal to everywhere; of equal ones the first."""
    kept: list[int] = []
    for index, row in enumerate(values):
        better = [
            other
            for other in range(len(values))
            if (values[other] <= row).all() and ((values[other] < row).any() or other < index)
        ]
        if not better:
            kept.append(index)
    return kept
