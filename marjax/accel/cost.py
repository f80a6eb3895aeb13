"""What layers cost, in multiply-adds per row of a batch: for the plan, and for reports.

Products of weights and of attention are counted; norms, activations and biases are not.
"""

from __future__ import annotations

import numpy as np

from marjax.config import MARConfig


def layer_cost(queries, keys, dim: int, depth: int, mlp_ratio: float, *, mlp_rows=None):
    """`depth` layers over so many positions that attend to so many keys."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)  # the products overflow int32
    rows = queries if mlp_rows is None else np.asarray(mlp_rows, np.float64)
    return depth * (queries * 4 * dim**2 + 2 * queries * keys * dim + rows * 2 * mlp_ratio * dim**2)


def encoder_cost(config: MARConfig, known):
    """The encoder over buffers and so many tokens."""
    total = config.buffer_size + np.asarray(known)
    return layer_cost(total, total, config.encoder_embed_dim, config.encoder_depth, config.mlp_ratio)


def decoder_cost(config: MARConfig, outputs):
    """The decoder over all positions, for the output at so many of them."""
    total, dim, ratio = config.buffer_size + config.seq_len, config.decoder_embed_dim, config.mlp_ratio
    outputs = np.asarray(outputs, np.float64)
    last = total * 3 * dim**2 + outputs * (dim**2 + 2 * total * dim + 2 * ratio * dim**2)
    return layer_cost(total, total, dim, config.decoder_depth - 1, ratio) + last
