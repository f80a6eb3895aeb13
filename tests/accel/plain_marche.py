"""MARché again, in plain NumPy and float64, for one image: dense, with dynamic shapes and no cache tricks.

Written from the description of the method, not from the code. Everything is in generation order; positions are buffers,
then tokens.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class Layer:
    """One transformer block in parts; rows are [M, E]."""

    def __init__(self, stack, index, heads):
        self.p = {n: {m: np.asarray(leaf[index], np.float64) for m, leaf in part.items()} for n, part in stack.items()}
        self.heads = heads

    def qkv(self, x):
        q, k, v = (
            linear(self.p["qkv"], layer_norm(self.p["norm1"], x)).reshape(len(x), 3, self.heads, -1).swapaxes(0, 1)
        )
        return q * q.shape[-1] ** -0.5, k, v

    @staticmethod
    def weights(q, k):
        return softmax(np.einsum("mhd,nhd->hmn", q, k))

    def attend(self, x, q, k, v):
        out = np.einsum("hmn,nhd->mhd", self.weights(q, k), v).reshape(len(q), -1)
        return x + linear(self.p["proj"], out)

    def mlp(self, x):
        h = linear(self.p["fc1"], layer_norm(self.p["norm2"], x))
        return x + linear(self.p["fc2"], h * 0.5 * (1 + erf(h / np.sqrt(2))))


class PlainMarche:
    """The model, its caches, and the options of one run."""

    def __init__(self, params, order, class_emb, *, budget, period=3, decision_layer=2, **options):
        config, tree = params.config, params.mar
        as64 = lambda part: {name: np.asarray(leaf, np.float64) for name, leaf in part.items()}  # noqa: E731
        self.config, self.buffers, self.class_emb = config, config.buffer_size, np.asarray(class_emb, np.float64)
        self.tree = {name: as64(tree[name]) for name in ("z_proj", "z_proj_ln", "encoder_norm", "decoder_embed")}
        self.mask_token = np.asarray(tree["mask_token"], np.float64)[0]
        positions = np.concatenate([np.arange(self.buffers), self.buffers + order])
        self.enc_pos = np.asarray(tree["encoder_pos_embed_learned"], np.float64)[positions]
        self.dec_pos = np.asarray(tree["decoder_pos_embed_learned"], np.float64)[positions]
        self.enc = [Layer(tree["encoder_blocks"], i, config.encoder_num_heads) for i in range(config.encoder_depth)]
        self.dec = [Layer(tree["decoder_blocks"], i, config.decoder_num_heads) for i in range(config.decoder_depth)]
        self.budget, self.period, self.decision = budget, period, decision_layer
        defaults = {"select": "attention", "include_generating": True, "include_caching": True, "skip_mlp": True}
        defaults |= {"encoder": "incremental", "encoder_buffers": "cached", "buffers": "scored"}
        self.options = defaults | options
        self.enc_kv, self.dec_in, self.dec_kv = None, None, None

    def embed(self, tokens, rows):
        """Encoder input of positions `rows`; `tokens` are all tokens in generation order."""
        x = np.stack(
            [
                self.class_emb if row < self.buffers else linear(self.tree["z_proj"], tokens[row - self.buffers])
                for row in rows
            ]
        )
        return layer_norm(self.tree["z_proj_ln"], x + self.enc_pos[rows])

    def encode_all(self, tokens, known):
        rows = np.arange(self.buffers + known)
        x, self.enc_kv = self.embed(tokens, rows), []
        for layer in self.enc:
            q, k, v = layer.qkv(x)
            self.enc_kv.append((k, v))
            x = layer.mlp(layer.attend(x, q, k, v))
        self.dec_in = np.broadcast_to(self.mask_token, self.dec_pos.shape) + self.dec_pos
        self.dec_in[rows] = self.embedded(x) + self.dec_pos[rows]

    def encode_new(self, tokens, known, previous):
        new = np.arange(self.buffers + known - previous, self.buffers + known)
        again = self.options["encoder_buffers"] == "recomputed"
        rows = np.concatenate([np.arange(self.buffers), new]) if again else new
        if not len(rows):
            return
        x = self.embed(tokens, rows)
        for index, layer in enumerate(self.enc):
            q, k, v = layer.qkv(x)
            old_k, old_v = self.enc_kv[index]
            room = ((0, previous), (0, 0), (0, 0))
            all_k, all_v = np.pad(old_k, room), np.pad(old_v, room)
            all_k[rows], all_v[rows] = k, v
            self.enc_kv[index] = all_k, all_v
            x = layer.mlp(layer.attend(x, q, all_k, all_v))
        self.dec_in[rows] = self.embedded(x) + self.dec_pos[rows]

    def embedded(self, x):
        return linear(self.tree["decoder_embed"], layer_norm(self.tree["encoder_norm"], x))

    def step(self, number, tokens, known, predicted, previous):
        """The decoder's output for the tokens predicted now [predicted, E], and the active positions (None: all)."""
        now = np.arange(self.buffers + known, self.buffers + known + predicted)
        if number % self.period == 0:
            self.encode_all(tokens, known)
            x, self.dec_kv = self.dec_in, []
            for layer in self.dec:
                q, k, v = layer.qkv(x)
                self.dec_kv.append([k.copy(), v.copy()])
                x = layer.mlp(layer.attend(x, q, k, v))
            return x[now], None
        if self.options["encoder"] == "full":
            self.encode_all(tokens, known)
        else:
            self.encode_new(tokens, known, previous)
        x = self.dec_in
        for layer in self.dec[: self.decision]:
            q, k, v = layer.qkv(x)
            scores = layer.weights(q[now], k).mean(axis=(0, 1))
            x = layer.mlp(layer.attend(x, q, k, v))
        active = self.choose(scores, now, np.arange(self.buffers + known - previous, self.buffers + known))
        chosen, rest = x[active], x
        for index, layer in enumerate(self.dec[self.decision :], self.decision):
            q, k, v = layer.qkv(chosen)
            cache_k, cache_v = self.dec_kv[index]
            cache_k[active], cache_v[active] = k, v
            chosen = layer.attend(chosen, q, cache_k, cache_v)
            if self.options["skip_mlp"]:
                chosen = layer.mlp(chosen)
            else:
                rest = rest.copy()
                rest[active] = chosen
                rest = layer.mlp(rest)
                chosen = rest[active]
        out = rest.copy()
        out[active] = chosen
        return out[now], active

    def choose(self, scores, now, before):
        """Active positions, ascending: the forced ones, then the best of the rest until the budget is full."""
        forced = set()
        if self.options["include_generating"]:
            forced |= set(now.tolist())
        if self.options["include_caching"]:
            forced |= set(before.tolist())
        buffers = set(range(self.buffers))
        if self.options["buffers"] == "always":
            forced |= buffers
        order = np.argsort(-scores if self.options["select"] == "attention" else scores, kind="stable")
        excluded = buffers if self.options["buffers"] == "never" else set()
        rest = [place for place in order.tolist() if place not in forced and place not in excluded]
        rest = rest[: max(0, self.budget - len(forced))]
        return np.array(sorted(forced | set(rest)))
