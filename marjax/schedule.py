"""The decode plan: how many tokens each step predicts, and which steps share a compiled body; numpy, before tracing.

Everything about the schedule depends on (sequence length, num_iter, known tokens at the start), never on data:

    1. `step_counts`: tokens known before each step, by the reference's cosine rule
    2. `make_plan`: consecutive steps grouped into segments; a segment has static sizes that cover its steps (room for
       known tokens, tokens predicted at most) and per-step rows of traced numbers
    3. the grouping minimises cost, each further body paying for its compilation; at most `MAX_BODIES`
    4. inpainting starts from known tokens: starting counts of one bucket share segments, so one compiled program
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from flax import struct

MAX_BODIES = 8  # compiled loop bodies per plan
BUCKETS = 8  # of starting counts above 0
BODY_COST = 0.02  # what one more body must save, as a share of the whole decode

Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Caching(Protocol):
    """What a plan asks of an acceleration that keeps caches between steps."""

    def refresh_steps(self, num_iter: int) -> np.ndarray:
        """[steps] bool: which steps refresh every cache. The first step does in any case."""

    def active_counts(self, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """[steps] int: positions that each step recomputes in its deep layers, if it is a cached one."""

    def cached_cost(self, known: np.ndarray, predicted: np.ndarray, previous: np.ndarray, active: np.ndarray):
        """Cost of a cached step with that room, in the unit of the plan's `Cost`."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Static sizes of a run of steps that share one compiled body.

    Attributes:
        num_steps: steps in the run.
        known: K, known tokens the encoder has room for.
        predicted: P, tokens predicted at most in a step.
        previous: Q, tokens predicted at most in the step before a cached one; 0 without cached steps.
        active: A, positions that a cached step recomputes at most in its deep layers; 0 without cached steps.
        num_refresh: how many of the steps refresh every cache.
    """

    num_steps: int
    known: int
    predicted: int
    previous: int = 0
    active: int = 0
    num_refresh: int = 0


@struct.dataclass
class Rows:
    """Per-step numbers, traced; each an array [steps] in a plan and a scalar inside the loop.

    Attributes:
        num_known: tokens known before the step, int32. Tokens [num_known, num_known + num_predicted) are predicted.
        num_predicted: tokens predicted in the step, int32.
        progress: (S - mask_len) / S, float32: the share of the sequence that linear guidance has gone through.
        refresh: whether the step refreshes every cache; True throughout where there are none.
        num_previous: tokens predicted in the step before, int32; they are the last of the known ones.
        num_active: positions that a cached step recomputes in its deep layers, int32.
    """

    num_known: np.ndarray
    num_predicted: np.ndarray
    progress: np.ndarray
    refresh: np.ndarray
    num_previous: np.ndarray
    num_active: np.ndarray

    def guidance(self, cfg, cfg_schedule: str):
        """Guidance scale of each step: `cfg`, reached linearly or held constant (reference `cfg_iter`)."""
        return 1.0 + (cfg - 1.0) * self.progress if cfg_schedule == "linear" else cfg + 0.0 * self.progress


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Segments in order, and the rows of each.

    Attributes:
        segments: static sizes; hashable, so they can be a static argument of a jitted function.
        rows: per-step numbers of each segment.
    """

    segments: tuple[Segment, ...]
    rows: tuple[Rows, ...]


def step_counts(seq_len: int, num_iter: int, num_known: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token counts of each step (reference `sample_tokens`; with known tokens, the same rule over the rest).

    Args:
        seq_len: S, at least 1.
        num_iter: steps, in [1, S - num_known].
        num_known: tokens known before the first step, in [0, S).

    Returns:
        known [num_iter + 1] int32: tokens known before each step, then S.
        mask_len [num_iter] int32: tokens the reference's rule leaves masked after each step. It is 1 at the last
        step, which predicts all the same whatever remains.

    Raises:
        ValueError: if an argument is out of range.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1.")
    if not 0 <= num_known < seq_len:
        raise ValueError(f"num_known={num_known} must lie in [0, seq_len={seq_len}).")
    unknown = seq_len - num_known
    if not 1 <= num_iter <= unknown:
        raise ValueError(f"num_iter={num_iter} must lie in [1, {unknown}], the number of tokens to generate.")
    left, known, mask_lens = unknown, [num_known], []
    for step in range(num_iter):
        ratio = math.cos(math.pi / 2 * (step + 1) / num_iter)
        mask_len = max(1, min(left - 1, math.floor(unknown * ratio)))
        left = mask_len if step + 1 < num_iter else 0
        mask_lens.append(mask_len)
        known.append(seq_len - left)
    return np.array(known, np.int32), np.array(mask_lens, np.int32)


def make_plan(seq_len: int, num_iter: int, cost: Cost, num_known: int = 0, caching: Caching | None = None) -> Plan:
    """The plan of a decode.

    Args:
        seq_len: S, at least 1.
        num_iter: steps, at least 1; as many as there are tokens to generate, if those are fewer.
        cost: (K, P) -> relative cost of one step with that room, elementwise over arrays.
        num_known: tokens known before the first step, in [0, S).
        caching: the caches; None refreshes at every step.

    Returns:
        The plan. Its segments depend on `starting_bucket` of `num_known` alone. Where others of the bucket have more
        tokens to generate, and for that more steps, the plan ends with steps that predict nothing.

    Raises:
        ValueError: as `step_counts`.
    """
    bucket = starting_bucket(seq_len, num_known)
    num_steps = min(num_iter, seq_len - bucket.start)
    plans = {start: _rows(seq_len, num_iter, start, num_steps, caching) for start in bucket}

    def most(count: Callable[[Rows], np.ndarray]) -> np.ndarray:
        """Room for every plan of the bucket, at each step. Steps that predict nothing need none."""
        return np.max([np.where(rows.num_predicted > 0, count(rows), 0) for rows in plans.values()], axis=0)

    refresh = plans[num_known].refresh
    sizes = {
        "known": np.maximum.accumulate(most(lambda rows: rows.num_known)),
        "predicted": most(lambda rows: rows.num_predicted),
        "previous": np.where(refresh, 0, most(lambda rows: rows.num_previous)),
        "active": np.where(refresh, 0, most(lambda rows: rows.num_active)),
    }
    bounds = _boundaries(refresh, sizes, cost, caching)
    pieces = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return Plan(
        segments=tuple(
            Segment(
                num_steps=piece.stop - piece.start,
                **{name: int(size[piece].max()) for name, size in sizes.items()},
                num_refresh=int(refresh[piece].sum()),
            )
            for piece in pieces
        ),
        rows=tuple(jax.tree.map(lambda row, piece=piece: row[piece], plans[num_known]) for piece in pieces),
    )


def starting_bucket(seq_len: int, num_known: int) -> range:
    """The starting counts that share a program with `num_known`: 0, that of plain sampling, is alone.

    Raises:
        ValueError: if `num_known` is not in [0, seq_len).
    """
    if not 0 <= num_known < seq_len:
        raise ValueError(f"num_known={num_known} must lie in [0, seq_len={seq_len}).")
    if num_known == 0:
        return range(1)
    size = math.ceil((seq_len - 1) / BUCKETS)
    start = 1 + (num_known - 1) // size * size
    return range(start, min(start + size, seq_len))


def _rows(seq_len: int, num_iter: int, num_known: int, num_steps: int, caching: Caching | None) -> Rows:
    """Rows of a decode, filled up to `num_steps` with steps at the end of the sequence that predict nothing."""
    known, mask_len = step_counts(seq_len, min(num_iter, seq_len - num_known), num_known)
    filling = num_steps - len(mask_len)
    known, mask_len = np.pad(known, (0, filling), mode="edge"), np.pad(mask_len, (0, filling), mode="edge")
    progress = ((seq_len - mask_len) / seq_len).astype(np.float32)
    predicted = np.diff(known)
    previous = np.concatenate([np.zeros(1, np.int32), predicted[:-1]])
    refresh, active = np.ones(num_steps, bool), np.zeros(num_steps, np.int32)
    if caching is not None:
        refresh = caching.refresh_steps(num_steps).copy()
        refresh[0] = True
        active = caching.active_counts(predicted, previous).astype(np.int32)
    return Rows(
        num_known=known[:-1],
        num_predicted=predicted,
        progress=progress,
        refresh=refresh,
        num_previous=previous,
        num_active=active,
    )


def _boundaries(refresh: np.ndarray, sizes: dict[str, np.ndarray], cost: Cost, caching: Caching | None) -> list[int]:
    """Cheapest grouping of consecutive steps, by dynamic programming: 0 = b_0 < b_1 < ... = steps."""
    steps = len(refresh)
    # Of steps i..j as one segment: [i, j] largest sizes, refreshes, cost.
    inside = np.arange(steps)[None] >= np.arange(steps)[:, None]
    most = {name: np.maximum.accumulate(np.where(inside, size[None], 0), axis=1) for name, size in sizes.items()}
    refreshes, lengths = (np.cumsum(np.where(inside, each, 0), axis=1) for each in (refresh, np.ones(steps, int)))
    total = refreshes * cost(most["known"], most["predicted"])
    if caching is not None:
        total = total + (lengths - refreshes) * caching.cached_cost(**most)
    total = np.where(inside, total, np.inf)
    extra = BODY_COST * total[0, -1]

    best, choice = total[0] + extra, [np.zeros(steps, int)]  # best[j]: cheapest cover of steps 0..j
    costs = [best[-1]]
    for _ in range(min(MAX_BODIES, steps) - 1):
        # Cover 0..i-1 as before, then one segment i..j.
        candidates = np.concatenate([[np.inf], best[:-1]])[:, None] + total + extra
        choice.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
        costs.append(best[-1])
    bounds = [steps]
    for layer in range(int(np.argmin(costs)), -1, -1):
        bounds.append(int(choice[layer][bounds[-1] - 1]))
    return bounds[::-1]
