"""Bayesian optimisation with trust regions (TSCompiler §5.1; TuRBO, Eriksson et al. 2019).

Each region has a Gaussian process of its own and the box around its best schedule in which that is
trusted.  A box grows after improvements and shrinks after failures; a region whose box is too
small starts anew.  In each round candidates are drawn in all boxes, *projected* to schedules and
*pruned* of those that break a hard constraint; a sample of each process ranks them, and the least
samples over all regions are asked for: regions are the arms of a bandit that is played by Thompson
sampling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.errors import MissingTunerError
from magjit_triton.macro.space import Space

__all__ = ["TrustRegions"]

_LENGTH, _LEAST_LENGTH, _MOST_LENGTH = 0.8, 0.1, 1.6
_SUCCESSES, _FAILURES = 2, 2
_DRAWN = 256


@dataclass
class _Region:
    """One box.

    Attributes:
        costs: of what was asked for it.
        length: of the box's sides.
    """

    costs: dict[Configuration, float] = field(default_factory=dict)
    length: float = _LENGTH
    successes: int = 0
    failures: int = 0
    waiting: list[Configuration] = field(default_factory=list)

    @property
    def best(self) -> tuple[float, Configuration] | None:
        """The least cost, if any is finite."""
        found = [(value, one) for one, value in self.costs.items() if math.isfinite(value)]
        return min(found, default=None)


class TrustRegions:
    """A ``Search``.

    Args:
        space: of schedules.
        seed: two searches with one seed ask the same.
        regions: how many.
        population: hardware-aligned schedules that each region begins with.

    Raises:
        MissingTunerError: BoTorch is not installed.
    """

    def __init__(self, space: Space, seed: int, *, regions: int = 3, population: int = 4) -> None:
        try:
            import botorch  # noqa: F401
        except ImportError as error:
            raise MissingTunerError(
                f"The search needs BoTorch: {error}",
                remedy="pip install 'magjit[tune]', or --search random or coordinate",
            ) from error
        self._space = space
        self._random = random.Random(seed)
        self._seed = seed
        self._asked: set[Configuration] = set()
        self._owner: dict[Configuration, _Region] = {}
        first = space.first_population(regions * population)
        self._random.shuffle(first)
        self._regions = [_Region(waiting=first[i::regions]) for i in range(regions)]
        self._population = population

    def ask(self, count: int) -> list[Configuration]:
        """The first populations, then the least samples over all regions."""
        taken: list[Configuration] = []
        waiting = [region for region in self._regions if region.waiting]
        while waiting and len(taken) < count:
            for region in waiting:
                one = region.waiting.pop(0)
                if one not in self._asked and len(taken) < count:
                    self._take(one, region, taken)
            waiting = [region for region in self._regions if region.waiting]
        if len(taken) < count:
            self._sampled(count, taken)
        return taken

    def _take(self, one: Configuration, region: _Region, taken: list[Configuration]) -> None:
        self._asked.add(one)
        self._owner[one] = region
        taken.append(one)

    def _sampled(self, count: int, taken: list[Configuration]) -> None:
        wanted = count - len(taken)
        arms = []
        for region in self._regions:
            drawn = self._drawn(region)
            if drawn:
                arms.append((region, drawn, self._samples(region, drawn, wanted)))
        for turn in range(wanted):
            offers = [
                (float(samples[turn, place]), number, one)
                for number, (_, drawn, samples) in enumerate(arms)
                for place, one in enumerate(drawn)
                if one not in self._asked
            ]
            if offers:
                _, number, one = min(offers)
                self._take(one, arms[number][0], taken)
                continue
            left = [one for one in self._space.legal if one not in self._asked]
            if not left:
                return
            self._take(self._random.choice(left), self._random.choice(self._regions), taken)

    def _drawn(self, region: _Region) -> list[Configuration]:
        """Schedules of a box that were not asked for, by projection and pruning."""
        best = region.best
        if best is None:
            return []
        centre = self._space.encoded(best[1])
        half = region.length / 2
        engine = torch.quasirandom.SobolEngine(
            self._space.dimensions, scramble=True, seed=self._random.randrange(2**31)
        )
        found: dict[Configuration, None] = {}
        for row in engine.draw(_DRAWN).tolist():
            point = [
                # Most schedules differ from the best one along some axes only.
                at if self._random.random() < 0.4 else at + (2 * place - 1) * half
                for at, place in zip(centre, row, strict=True)
            ]
            one = self._space.projected(point)
            if one not in self._asked and self._space.is_legal(one):
                found[one] = None
        return list(found)

    def _samples(self, region: _Region, drawn: list[Configuration], count: int) -> torch.Tensor:
        """Costs that the region's process may have at the schedules: [count, schedules]."""
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Standardize
        from gpytorch.mlls import ExactMarginalLogLikelihood

        finite = [value for value in region.costs.values() if math.isfinite(value)]
        worst = max(finite) + 0.5
        places = self._tensor(list(region.costs))
        values = torch.tensor([min(one, worst) for one in region.costs.values()]).double()[:, None]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self._random.randrange(2**31))
            if len(finite) < 2 or float(values.std()) < 1e-9:
                return torch.rand(count, len(drawn))
            model: Any = SingleTaskGP(places, values, outcome_transform=Standardize(1))
            likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
            fit_gpytorch_mll(likelihood, optimizer_kwargs={"options": {"maxiter": 40}})
            with torch.no_grad():
                posterior = model.posterior(self._tensor(drawn))
                samples: torch.Tensor = posterior.rsample(torch.Size([count]))[..., 0]
                return samples

    def _tensor(self, configurations: list[Configuration]) -> torch.Tensor:
        return torch.tensor([self._space.encoded(one) for one in configurations]).double()

    def tell(self, costs: Mapping[Configuration, float]) -> None:
        """Grow the boxes of regions that improved, shrink others, start small ones anew."""
        before = [region.best for region in self._regions]
        touched = []
        for one, value in costs.items():
            region = self._owner.get(one)
            if region is not None:
                region.costs[one] = value
                touched.append(id(region))
        for region, earlier in zip(self._regions, before, strict=True):
            if id(region) not in touched or earlier is None:
                continue
            now = region.best
            assert now is not None
            better = now[0] < earlier[0] - 1e-3
            region.successes = region.successes + 1 if better else 0
            region.failures = 0 if better else region.failures + 1
            if region.successes >= _SUCCESSES:
                region.length, region.successes = min(_MOST_LENGTH, region.length * 2), 0
            if region.failures >= _FAILURES:
                region.length, region.failures = region.length / 2, 0
            if region.length < _LEAST_LENGTH:
                self._restart(region)

    def _restart(self, region: _Region) -> None:
        left = [one for one in self._space.aligned if one not in self._asked]
        self._random.shuffle(left)
        region.costs = {}
        region.length, region.successes, region.failures = _LENGTH, 0, 0
        region.waiting = left[: self._population]
