"""The decode plan of an accelerated model: what its steps cost, which of them refresh, how much each recomputes."""

from __future__ import annotations

import dataclasses

import numpy as np

from marjax.accel.base import Accel
from marjax.accel.cost import decoder_cost, encoder_cost
from marjax.config import MARConfig
from marjax.schedule import Plan, make_plan

EXACT = Accel()


def plan_for(
    config: MARConfig, num_iter: int, num_steps: int, num_known: int = 0, *, accel: Accel = EXACT, guided: bool = True
) -> Plan:
    """The plan of a decode.

    Args:
        config: the model's configuration.
        num_iter: decode steps.
        num_steps: diffusion steps per token.
        num_known: tokens known before the first step.
        accel: the acceleration.
        guided: whether there is an unconditional half.

    Raises:
        ValueError: if the acceleration does not fit the model.
    """
    accel.check(config)
    cost = StepCost(config, accel, num_steps, guided)
    return make_plan(config.seq_len, num_iter, cost.refresh_cost, num_known, cost)


def flops_per_image(plan: Plan, cost: StepCost) -> float:
    """Floating-point operations of the products that a decode runs for one image, padding included."""
    total = 0.0
    for segment in plan.segments:
        cached = cost.cached_cost(segment.known, segment.predicted, segment.previous, segment.active)
        refresh = cost.refresh_cost(segment.known, segment.predicted)
        total += segment.num_refresh * refresh + (segment.num_steps - segment.num_refresh) * cached
    return 2.0 * float(total)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of the steps of one decode.

    Attributes:
        config: the model's configuration.
        accel: the acceleration.
        num_steps: diffusion steps per token.
        guided: whether there is an unconditional half.
    """

    config: MARConfig
    accel: Accel
    num_steps: int
    guided: bool

    def refresh_cost(self, known, predicted):
        """A step that computes everything, with room for so many tokens."""
        outputs = self.config.seq_len if self.guided and self.accel.condition is not None else predicted
        decoder = decoder_cost(self.config, outputs)
        return self._rows * (encoder_cost(self.config, known) + decoder) + self._head(predicted)

    def cached_cost(self, known, predicted, previous, active):
        """A cached step with that room."""
        rows = 1 if self.accel.condition else self._rows
        return rows * self.accel.tokens.cached_cost(self.config, known, predicted, previous, active) + self._head(
            predicted
        )

    def refresh_steps(self, num_iter: int) -> np.ndarray:
        """[steps] bool: which steps refresh every cache."""
        return self.accel.refresh_steps(num_iter, guided=self.guided)

    def active_counts(self, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """[steps] int: positions that each step recomputes in its deep layers, if it is a cached one."""
        return self.accel.tokens.active_counts(self.config, num_predicted, num_previous)

    @property
    def _rows(self) -> int:
        return 2 if self.guided else 1

    def _head(self, predicted):
        config = self.config
        per_token = self.accel.head.cost(config.diffloss_d, config.diffloss_w, self.num_steps, guided=self.guided)
        return np.asarray(predicted, np.float64) * per_token
