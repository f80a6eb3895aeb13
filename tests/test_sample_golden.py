"""End-to-end sampling against the reference: recorded orders and noise, every run of the golden files."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from helpers import golden_params

import marjax
from marjax.schedule import step_counts

RUNS = [
    *[f"tiny_sample_iter8_cfg{cfg}_T{t}" for cfg in ("1", "3lin", "3const") for t in ("1", "0.95")],
    *["tiny_sample_iter64_cfg1_T1", "tiny_sample_iter64_cfg3lin_T0.95", "tiny_sample_iter64_cfg3const_T1"],
    "tiny_p2_sample_iter4_cfg3lin_T1",
]


def replay_noise(recorded: dict[str, np.ndarray], mask_to_pred: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The reference's draws, [B, S, T + 1, D] in our generation order.

    The reference draws rows of (image, ascending position) for the tokens of a step; of guided draws the first half
    is the one that counts.
    """
    starts = np.concatenate([[0], np.cumsum(recorded["noise_rows"])])
    draws_of_step = [np.flatnonzero(recorded["noise_ar_step"] == step) for step in range(len(mask_to_pred))]
    batch, seq_len = order.shape
    noise = np.full((batch, seq_len, len(draws_of_step[0]), recorded["noise"].shape[1]), np.nan, np.float32)
    for mask, draws in zip(mask_to_pred.astype(bool), draws_of_step, strict=True):
        for index, draw in enumerate(draws):
            noise[:, :, index][mask] = recorded["noise"][starts[draw] :][: mask.sum()]
    return np.take_along_axis(noise, order[:, :, None, None], axis=1)


@pytest.mark.parametrize("name", RUNS)
def test_replay_matches_reference(golden, name):
    run = golden(f"{name}.npz")
    options = json.loads(str(run["run"]))
    params = golden_params("tiny_p2" if "p2" in name else "tiny")
    order = run["orders"][:, ::-1]  # the reference decodes from the end of its order
    seq_len = order.shape[1]

    known, mask_len = step_counts(seq_len, options["num_iter"])
    assert (mask_len == run["mask_len"]).all()
    for step, mask in enumerate(run["mask_to_pred"].astype(bool)):
        for image in range(len(order)):
            assert set(order[image, known[step] : known[step + 1]]) == set(np.flatnonzero(mask[image]))

    latents = marjax.sample_latents(
        params,
        jax.random.key(0),
        run["labels"],
        num_iter=options["num_iter"],
        cfg=options["cfg"],
        cfg_schedule=options["cfg_schedule"],
        temperature=options["temperature"],
        order=order,
        noise=replay_noise(golden(str(run["noise_file"])), run["mask_to_pred"], order),
        dtype="float32",
    )
    expected = run["final_latent"].transpose(0, 2, 3, 1)
    # The head of tiny_p2 is random, so its samples are as large as 9e4 (golden README).
    tolerance = 1e-5 * np.abs(expected).max() if "p2" in name else 6e-3
    np.testing.assert_allclose(latents, expected, rtol=0, atol=tolerance)
