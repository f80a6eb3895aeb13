"""Invariants of the decode plan."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from marjax.accel import Accel
from marjax.accel.plan import StepCost, plan_for
from marjax.config import PRESETS
from marjax.schedule import BODY_COST, BUCKETS, MAX_BODIES, make_plan, starting_bucket, step_counts


@st.composite
def schedules(draw, max_len=1024):
    seq_len = draw(st.integers(1, max_len))
    num_known = draw(st.integers(0, seq_len - 1))
    return seq_len, draw(st.integers(1, seq_len - num_known)), num_known


def linear_cost(known, predicted):
    return 10.0 + known + 5.0 * predicted


@hypothesis.given(schedules())
def test_each_token_is_predicted_exactly_once(schedule):
    seq_len, num_iter, num_known = schedule
    known, _ = step_counts(*schedule)
    assert len(known) == num_iter + 1
    assert known[0] == num_known
    assert known[-1] == seq_len
    assert (np.diff(known) >= 1).all()


@hypothesis.given(schedules())
def test_counts_follow_the_reference_loop(schedule):
    # The reference keeps a mask and shrinks it: models/mar.py, sample_tokens.
    seq_len, num_iter, num_known = schedule
    known, mask_len = step_counts(*schedule)
    unknown = seq_len - num_known
    masked = unknown
    for step in range(num_iter):
        length = np.floor(unknown * np.cos(math.pi / 2.0 * (step + 1) / num_iter))
        length = max(1, min(masked - 1, int(length)))
        predicted = masked if step >= num_iter - 1 else masked - length
        assert known[step] == seq_len - masked
        assert mask_len[step] == length
        assert known[step + 1] - known[step] == predicted
        masked = length


@hypothesis.settings(max_examples=40)
@hypothesis.given(schedules(max_len=256))
def test_plan_covers_every_step_within_its_sizes(schedule):
    seq_len, num_iter, num_known = schedule
    plan = make_plan(seq_len, num_iter, linear_cost, num_known)
    known, mask_len = step_counts(*schedule)
    steps = sum(segment.num_steps for segment in plan.segments)
    assert 1 <= len(plan.segments) <= MAX_BODIES and steps >= num_iter
    filling = [seq_len] * (steps - num_iter)
    assert np.concatenate([rows.num_known for rows in plan.rows]).tolist() == known[:-1].tolist() + filling
    predicted = np.concatenate([rows.num_predicted for rows in plan.rows]).tolist()
    assert predicted == np.diff(known).tolist() + [0] * len(filling)
    progress = np.concatenate([rows.progress for rows in plan.rows])
    np.testing.assert_allclose(progress[:num_iter], (seq_len - mask_len) / seq_len, rtol=1e-6)
    for segment, rows in zip(plan.segments, plan.rows, strict=True):
        assert len(rows.num_known) == segment.num_steps >= 1
        assert rows.num_predicted.max() <= segment.predicted
        assert rows.num_known[rows.num_predicted > 0].max(initial=0) <= segment.known
        if num_known == 0:
            assert rows.num_known.max() == segment.known and rows.num_predicted.max() == segment.predicted


@hypothesis.settings(max_examples=30)
@hypothesis.given(schedules(max_len=256))
def test_starting_counts_of_a_bucket_share_segments(schedule):
    seq_len, _, num_known = schedule
    bucket = starting_bucket(seq_len, num_known)
    assert num_known in bucket and (bucket == range(1)) == (num_known == 0)
    plans = {start: make_plan(seq_len, 16, linear_cost, start).segments for start in {bucket[0], num_known, bucket[-1]}}
    assert len(set(plans.values())) == 1
    assert sum(segment.num_steps for segment in plans[num_known]) == min(16, seq_len - bucket[0])


@pytest.mark.parametrize("seq_len", [1, 2, 9, 64, 196, 256])
def test_buckets_are_few_and_cover_every_count(seq_len):
    buckets = {starting_bucket(seq_len, count) for count in range(seq_len)}
    assert sorted(count for bucket in buckets for count in bucket) == list(range(seq_len))
    assert len(buckets) <= BUCKETS + 1


@hypothesis.settings(max_examples=30)
@hypothesis.given(schedules(max_len=12))
def test_grouping_is_the_cheapest(schedule):
    seq_len, num_iter, _ = schedule
    known, _ = step_counts(seq_len, num_iter)
    start, predicted = known[:-1], np.diff(known)

    def price(bounds):
        pieces = [slice(i, j) for i, j in itertools.pairwise(bounds)]
        work = sum((p.stop - p.start) * linear_cost(start[p].max(), predicted[p].max()) for p in pieces)
        return work + len(pieces) * BODY_COST * num_iter * linear_cost(start.max(), predicted.max())

    inner = [
        cut for count in range(min(MAX_BODIES, num_iter)) for cut in itertools.combinations(range(1, num_iter), count)
    ]
    cheapest = min(price((0, *cut, num_iter)) for cut in inner)
    plan = make_plan(seq_len, num_iter, linear_cost)
    bounds = np.cumsum([0] + [segment.num_steps for segment in plan.segments])
    assert price(bounds) == pytest.approx(cheapest, rel=1e-9)


def test_guidance_is_linear_or_constant():
    plan = make_plan(256, 64, linear_cost)
    _, mask_len = step_counts(256, 64)
    linear = np.concatenate([rows.guidance(3.0, "linear") for rows in plan.rows])
    np.testing.assert_allclose(linear, 1 + 2 * (256 - mask_len) / 256, rtol=1e-6)
    constant = np.concatenate([rows.guidance(3.0, "constant") for rows in plan.rows])
    np.testing.assert_array_equal(constant, np.full(64, 3.0))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_planned_work_is_near_the_floor(preset):
    """The compiled bodies do at most 15 % more multiply-adds than steps without padding would."""
    config = PRESETS[preset]
    cost = StepCost(config, Accel(), 100, guided=True).refresh_cost
    plan = plan_for(config, 64, 100)
    known, _ = step_counts(config.seq_len, 64)
    floor = cost(known[:-1], np.diff(known)).sum()
    planned = sum(s.num_steps * cost(np.array(s.known), np.array(s.predicted)) for s in plan.segments)
    assert floor <= planned <= 1.15 * floor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), r"seq_len=0 must be at least 1"),
        ((16, 0), r"num_iter=0 must lie in \[1, 16\]"),
        ((16, 17), r"num_iter=17 must lie in \[1, 16\]"),
        ((16, 5, 12), r"num_iter=5 must lie in \[1, 4\]"),
        ((16, 1, 16), r"num_known=16 must lie in \[0, seq_len=16\)"),
        ((16, 1, -1), r"num_known=-1 must lie"),
    ],
)
def test_bad_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        step_counts(*arguments)
