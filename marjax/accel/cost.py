"""What layers cost, in multiply-adds per image: for the plan, and for reports.

Products of weights and of attention are counted; norms, activations and biases are not.
"""

from __future__ import annotations

import numpy as np


def layer_cost(queries, keys, dim: int, depth: int, mlp_ratio: float, *, mlp_rows=None):
    """`depth` layers over so many rows that attend to so many keys."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)  # the products overflow int32
    rows = queries if mlp_rows is None else np.asarray(mlp_rows, np.float64)
    return depth * (queries * 4 * dim**2 + 2 * queries * keys * dim + rows * 2 * mlp_ratio * dim**2)
