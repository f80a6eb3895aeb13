"""MARché against a plain NumPy re-statement, step by step with teacher forcing, and what holds for every choice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_marche import PlainMarche
from sample_helpers import CONFIG, PARAMS

from marjax import ActiveTokens, mar
from marjax.accel import Accel
from marjax.accel.base import StepInput
from marjax.accel.plan import plan_for
from marjax.accel.trace import codes

BATCH, STEPS = 2, 8
RNG = np.random.default_rng(0)
ORDER = np.stack([RNG.permutation(CONFIG.seq_len) for _ in range(BATCH)])
ROOM = CONFIG.seq_len  # tokens behind the end of the sequence, which no slice may run over
TOKENS = RNG.normal(size=(BATCH, CONFIG.seq_len + ROOM, CONFIG.token_dim)).astype(np.float32)
CLASS_EMB = np.asarray(PARAMS.mar["class_emb"])[[3, 7]]


def forced_steps(policy: ActiveTokens, num_iter: int = STEPS):
    """Every step of a decode on given tokens: its numbers, the output [B, p, E], and codes [B, N] (None: all)."""
    plan = plan_for(CONFIG, num_iter, 10, accel=Accel(tokens=policy), guided=False)
    positions = mar.gather_positions(PARAMS.mar, CONFIG, jnp.asarray(ORDER))
    room = max(segment.previous for segment in plan.segments)
    cache = policy.init(CONFIG, BATCH, room, jnp.float32)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(cache, rows, segment, full):
        keys = jax.random.split(jax.random.key(1), BATCH)
        step = StepInput(
            PARAMS.mar, jnp.asarray(TOKENS), jnp.asarray(CLASS_EMB), positions, rows, keys, CONFIG, segment
        )
        if full:
            cache, x = policy.full(cache, step)
            return cache, step.predicted(x), codes(None, step, BATCH)
        cache, x, chosen = policy.cached(cache, step)
        return cache, x, codes(chosen, step, BATCH)

    for segment, rows in zip(plan.segments, plan.rows, strict=True):
        for index in range(segment.num_steps):
            numbers = jax.tree.map(lambda row, index=index: row[index], rows)
            cache, x, code = run(cache, numbers, segment, bool(numbers.refresh))
            yield numbers, np.asarray(x)[:, : numbers.num_predicted], np.asarray(code), cache


OPTIONS = [
    {},
    {"encoder": "full"},
    {"encoder_buffers": "recomputed"},
    {"select": "least_attention"},
    {"include_caching": False},
    {"include_generating": False},
    {"buffers": "always"},
    {"buffers": "never"},
    {"skip_mlp": False},
    {"decision_layer": 1},
    {"decision_layer": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_plain_restatement(options):
    policy = ActiveTokens(budget=20, **options)
    plain = [PlainMarche(PARAMS, order, emb, budget=20, **options) for order, emb in zip(ORDER, CLASS_EMB, strict=True)]
    for number, (rows, x, code, _) in enumerate(forced_steps(policy)):
        for image, model in enumerate(plain):
            counts = int(rows.num_known), int(rows.num_predicted), int(rows.num_previous)
            expected, active = model.step(number, TOKENS[image], *counts)
            np.testing.assert_allclose(x[image], expected, rtol=0, atol=2e-5)
            got = np.flatnonzero(code[image])
            np.testing.assert_array_equal(got, np.arange(len(code[image])) if active is None else active)
