"""MARché against a plain NumPy re-statement, step by step with teacher forcing, and what holds for every choice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_marche import PlainMarche
from sample_helpers import CONFIG, PARAMS

import marjax
from marjax import ActiveTokens, codec, mar
from marjax.accel import Accel
from marjax.accel.base import StepInput, TokenPolicy
from marjax.accel.plan import plan_for
from marjax.accel.trace import REFRESHING, codes
from marjax.types import MARParams, cast_matrices

BATCH, STEPS = 2, 8


@functools.cache
def inputs(config=CONFIG):
    """Orders [B, S]; tokens [B, 2 S, D] in generation order, of which slices never reach the end."""
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(config.seq_len) for _ in range(BATCH)])
    return order, rng.normal(size=(BATCH, 2 * config.seq_len, config.token_dim)).astype(np.float32)


def class_embeddings(params=PARAMS):
    return np.asarray(params.mar["class_emb"])[[3, 7]]


def forced_steps(policy: TokenPolicy, num_iter: int = STEPS, params: MARParams = PARAMS, dtype=jnp.float32):
    """Every step of a decode on given tokens: its numbers, the output [B, p, E], codes [B, N], the cache."""
    config, tree = params.config, cast_matrices(params.mar, dtype)
    order, tokens = map(jnp.asarray, inputs(config))
    plan = plan_for(config, num_iter, 10, accel=Accel(tokens=policy), guided=False)
    positions = mar.gather_positions(tree, config, order)
    cache = policy.init(config, BATCH, max(segment.previous for segment in plan.segments), dtype)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(cache, rows, segment, full):
        keys = jax.random.split(jax.random.key(1), BATCH)
        step = StepInput(tree, tokens, class_embeddings(params), positions, rows, keys, config, segment)
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
    {"decision_layer": 1, "encoder_buffers": "recomputed", "buffers": "never"},
    {"encoder": "full", "skip_mlp": False, "include_caching": False},
]
SLOW_OPTIONS = [
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


@pytest.mark.parametrize(
    "options", [*OPTIONS, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW_OPTIONS)], ids=str
)
def test_equals_the_plain_restatement(options):
    policy = ActiveTokens(budget=20, **options)
    orders, tokens = inputs()
    plain = [
        PlainMarche(PARAMS, order, emb, budget=20, **options)
        for order, emb in zip(orders, class_embeddings(), strict=True)
    ]
    for number, (rows, x, code, _) in enumerate(forced_steps(policy)):
        for image, model in enumerate(plain):
            counts = int(rows.num_known), int(rows.num_predicted), int(rows.num_previous)
            expected, active = model.step(number, tokens[image], *counts)
            np.testing.assert_allclose(x[image], expected, rtol=0, atol=2e-5)
            got = np.flatnonzero(code[image])
            np.testing.assert_array_equal(got, np.arange(len(code[image])) if active is None else active)


def test_whole_decode_follows_the_plain_restatement():
    """A guided run through the loop itself; its halves choose for themselves, from the tokens that it generated."""
    order, _ = inputs()
    labels = [3, 7]
    options = {"num_iter": STEPS, "num_sampling_steps": 10, "cfg": 3.0, "dtype": "float32", "return_trace": True}
    latents, trace = marjax.sample_latents(
        PARAMS, jax.random.key(0), labels, order=order, accel="marche:budget=20", **options
    )
    tokens = np.take_along_axis(np.asarray(codec.patchify(latents, CONFIG.patch_size)), order[..., None], axis=1)
    positions = np.asarray(trace.positions)
    assert positions.shape == (STEPS, 2, 2, CONFIG.buffer_size + CONFIG.seq_len)
    unconditional, halves_differ = np.asarray(PARAMS.mar["fake_latent"]).reshape(-1), False
    for image in range(2):
        for half, emb in enumerate((class_embeddings()[image], unconditional)):
            model, previous = PlainMarche(PARAMS, order[image], emb, budget=20), 0
            for step in range(STEPS):
                known, predicted = int(trace.num_known[step]), int(trace.num_predicted[step])
                _, active = model.step(step, tokens[image], known, predicted, previous)
                code, previous = positions[step, half, image], predicted
                code = np.concatenate([code[: CONFIG.buffer_size], code[CONFIG.buffer_size :][order[image]]])
                expected = np.arange(len(code)) if active is None else active
                np.testing.assert_array_equal(np.flatnonzero(code), expected)
        halves_differ |= (positions[:, 0, image] != positions[:, 1, image]).any()
    assert halves_differ


def test_random_choice_depends_on_image_and_step():
    chosen = {}
    for _ in range(2):
        for number, (rows, _, code, _) in enumerate(forced_steps(ActiveTokens(budget=40, select="random"), 5)):
            if not rows.refresh:
                assert ((code != 0).sum(axis=1) == 40).all()
                free = code == REFRESHING
                assert (chosen.setdefault(number, free) == free).all()  # the same in every run
    assert all((free[0] != free[1]).any() for free in chosen.values())
    first, *others = chosen.values()
    assert all((first[0] != other[0]).any() for other in others)
