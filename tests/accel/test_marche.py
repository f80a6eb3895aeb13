"""MARché against a plain NumPy re-statement, step by step with teacher forcing, and what holds for every choice."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from accel_helpers import STEPS, class_embeddings, forced_steps, inputs
from plain_marche import PlainMarche
from sample_helpers import CONFIG, PARAMS

import marjax
from marjax import ActiveTokens, codec
from marjax.accel.trace import REFRESHING

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
