"""Finds the configuration that a reference state dict belongs to.

1. What the shapes tell is taken from them: widths, depths, classes, buffers, the head, values per token, tokens. Every
   key and shape must then be as such a model has it, and whatever else claims one of these numbers must agree.
2. What they cannot tell (heads of a fused qkv, patch size against latent channels, image size against stride) comes
   from whoever claims it: the training arguments in the file, the configuration that marjax recorded, the autoencoder.
   Claims that differ are an error.
3. What nobody claims follows from what is claimed, or comes from the one preset with exactly these shapes; otherwise it
   is an error that lists the possibilities.

An option of the command line settles 2 and 3, and stands above all claims; only the shapes it cannot contradict.

Errors are ValueErrors with a clause for a message.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from marjax.config import PRESETS, MARConfig, VAEConfig
from marjax.convert import Table, mar_source, mar_template, misfits
from marjax.convert_vae import refuse_latent_diffusion, vae_source, vae_template
from marjax.types import PyTree

Shapes = Mapping[str, tuple[int, ...]]
Claims = Mapping[str, Mapping[str, Any]]  # who claims it -> field -> value

# Models that the reference's `--model` names, which are presets of ours.
REFERENCE_MODELS = ("mar_base", "mar_large", "mar_huge")

_WIDTHS = (
    *("encoder_embed_dim", "encoder_depth", "encoder_num_heads"),
    *("decoder_embed_dim", "decoder_depth", "decoder_num_heads", "mlp_ratio"),
)
_HEADS = ("encoder_num_heads", "decoder_num_heads")
# Arguments of the reference's training script under the same name in MARConfig.
_ARGUMENTS = (
    *("img_size", "vae_embed_dim", "vae_stride", "patch_size", "buffer_size"),
    *("diffloss_d", "diffloss_w", "class_num"),
)
_SAMPLING = ("cfg", "cfg_schedule", "temperature", "num_sampling_steps", "class_names")
# Keys of well-known files that are something else.
_FOREIGN = {
    "first_stage_model.": "a whole latent-diffusion model",
    "encoder.down_blocks.": "an autoencoder in the layout of diffusers",
    "decoder.up_blocks.": "an autoencoder in the layout of diffusers",
    "x_embedder.": "a diffusion transformer",
    "module.": "the state dict of a wrapper, whose keys start with 'module.'",
    "mar/": "a checkpoint of marjax",
}
_LISTED = 6  # problems of a file that one message lists


def kind(keys: Iterable[str]) -> str:
    """What a state dict is: "mar" or "vae".

    Raises:
        ValueError: if it is neither; the reason is given where it is known.
    """
    keys = list(keys)
    if any(key.startswith(("encoder_blocks.", "decoder_blocks.", "diffloss.")) for key in keys):
        return "mar"
    for start, what in _FOREIGN.items():
        if any(key.startswith(start) for key in keys):
            raise ValueError(f"it is {what}, expected a MAR model or MAR's autoencoder; give that file")
    if any(key.startswith(("encoder.down.", "decoder.up.", "quant_conv.")) for key in keys):
        return "vae"
    found = ", ".join(sorted(keys)[:3]) or "nothing"
    raise ValueError(f"it is neither a MAR model nor MAR's autoencoder (its keys: {found}, ...); give such a file")


# The autoencoder.


def detect_vae(shapes: Shapes, scale: float | None = None) -> VAEConfig:
    """The configuration of an autoencoder; its shapes tell everything but the scale of the latents.

    Args:
        shapes: key -> shape.
        scale: the scale, None for the reference's.

    Raises:
        ValueError: if these are not the shapes of such an autoencoder, or are those of latent-diffusion.
    """
    refuse_latent_diffusion(shapes)
    levels, blocks = _count(shapes, "encoder.down."), _count(shapes, "encoder.down.0.block.")
    firsts = [f"encoder.down.{level}.block.0.conv1.weight" for level in range(levels)]
    _check_present(shapes, dict.fromkeys(["encoder.conv_in.weight", "post_quant_conv.weight", *firsts], 4))
    ch = shapes["encoder.conv_in.weight"][0]
    config = VAEConfig(
        ch=ch,
        ch_mult=tuple(shapes[key][0] // max(ch, 1) for key in firsts),
        num_res_blocks=blocks,
        embed_dim=shapes["post_quant_conv.weight"][0],
    )
    _check_fit(shapes, vae_template(config), vae_source, "autoencoder")
    return config if scale is None else dataclasses.replace(config, scale=scale)


# The model.


def detect_mar(
    shapes: Shapes,
    *,
    options: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    recorded: MARConfig | None = None,
    vae: VAEConfig | None = None,
) -> MARConfig:
    """The configuration of a MAR model.

    Args:
        shapes: key -> shape.
        options: fields of MARConfig that the user gave.
        args: the arguments of the reference's training run.
        recorded: the configuration that marjax recorded in the file.
        vae: the autoencoder that comes with the model.

    Returns:
        The configuration. Sampling defaults and the rest that no shape depends on come from the options, the recorded
        configuration, or the preset with these shapes.

    Raises:
        ValueError: if the shapes are not those of a MAR model, claims contradict them or one another, or something
            stays open.
    """
    options = options or {}
    ratio = options.get("mlp_ratio", recorded and recorded.mlp_ratio)
    told, token_dim, grid = _told_by_shapes(shapes, ratio)
    claims: dict[str, Mapping[str, Any]] = {}
    if args is not None:
        claims["its args"] = _claims_of_args(args, options)
    if recorded is not None:
        claims["its recorded configuration"] = {field: getattr(recorded, field) for field in (*_WIDTHS, *_ARGUMENTS)}
    for field, value in told.items():
        _check_told(field, value, options, claims)
    if vae is not None:
        claims["the autoencoder"] = {"vae_embed_dim": vae.embed_dim, "vae_stride": vae.stride}

    match = _matching_preset(told, token_dim, grid)
    fields = {
        **told,
        **{field: _heads(field, told, options, claims, match) for field in _HEADS},
        **_patches(token_dim, options, claims, match),
    }
    fields |= _sizes(grid * fields["patch_size"], grid, options, claims, match)
    if vae is not None and vae.stride != fields["vae_stride"]:
        raise ValueError(f"the autoencoder has stride {vae.stride}, but --vae-stride is {fields['vae_stride']}")
    base = recorded or match or MARConfig()
    free = {name: getattr(base, name) for name in (*_SAMPLING, "clip_denoised")}
    if args is not None and "num_sampling_steps" in args:
        free["num_sampling_steps"] = str(args["num_sampling_steps"])
    if base.class_num != told["class_num"]:
        free["class_names"] = ()
    if vae is None and base.vae is not None:
        fits = (base.vae.embed_dim, base.vae.stride) == (fields["vae_embed_dim"], fields["vae_stride"])
        vae = base.vae if fits else None
    return MARConfig(**{**fields, **free, **options, "vae": vae})


def preset_name(config: MARConfig) -> str | None:
    """The preset that a configuration equals, except for sampling defaults and class names."""
    fields = [field.name for field in dataclasses.fields(MARConfig) if field.name not in _SAMPLING]
    for name, preset in PRESETS.items():
        if all(getattr(config, field) == getattr(preset, field) for field in fields):
            return name
    return None


# What the shapes tell.


def _told_by_shapes(shapes: Shapes, preferred_ratio: float | None) -> tuple[dict[str, Any], int, int]:
    """Fields of MARConfig, values per token, and tokens per side; every key and shape is checked."""
    anchors = {
        **{f"{name}_pos_embed_learned": 3 for name in ("encoder", "decoder", "diffusion")},
        **{f"{name}_blocks.0.mlp.fc1.weight": 2 for name in ("encoder", "decoder")},
        **{"class_emb.weight": 2, "z_proj.weight": 2, "diffloss.net.input_proj.weight": 2},
    }
    _check_present(shapes, anchors)
    (_, positions, encoder_dim), (_, _, decoder_dim), (_, seq_len, _) = (shapes[key] for key in list(anchors)[:3])
    if positions <= seq_len or math.isqrt(seq_len) ** 2 != seq_len:
        raise ValueError(
            f"its position embeddings are for {positions} positions and {seq_len} tokens, expected a square number of "
            "tokens and more positions; it is damaged or not a MAR model"
        )
    hidden = [shapes[f"{name}_blocks.0.mlp.fc1.weight"][0] for name in ("encoder", "decoder")]
    told = {
        "encoder_embed_dim": encoder_dim,
        "encoder_depth": _count(shapes, "encoder_blocks."),
        "decoder_embed_dim": decoder_dim,
        "decoder_depth": _count(shapes, "decoder_blocks."),
        "mlp_ratio": _mlp_ratio([encoder_dim, decoder_dim], hidden, preferred_ratio),
        "class_num": shapes["class_emb.weight"][0],
        "buffer_size": positions - seq_len,
        "diffloss_d": _count(shapes, "diffloss.net.res_blocks."),
        "diffloss_w": shapes["diffloss.net.input_proj.weight"][0],
    }
    token_dim, grid = shapes["z_proj.weight"][1], math.isqrt(seq_len)
    # A model with the same shapes, whatever heads, patches and sizes are.
    stand_in = {"encoder_num_heads": 1, "decoder_num_heads": 1, "patch_size": 1, "vae_embed_dim": token_dim}
    config = MARConfig(**told, **stand_in, img_size=grid, vae_stride=1)
    _check_fit(shapes, mar_template(config), mar_source, "MAR model")
    return told, token_dim, grid


def _mlp_ratio(dims: list[int], hidden: list[int], preferred: float | None) -> float:
    """A ratio that gives both MLPs their width, which is rounded down: the preferred one if it does, or the least."""

    def fits(ratio: float) -> bool:
        return [int(dim * ratio) for dim in dims] == hidden

    if preferred is not None and not 0 < preferred < 1e6:
        raise ValueError(f"mlp_ratio={preferred} is asked for; expected a positive number")
    least = max(width / max(dim, 1) for width, dim in zip(hidden, dims, strict=True))
    candidates = [preferred or least, least, math.nextafter(least, math.inf)]
    if (ratio := next(filter(fits, candidates), None)) is None:
        raise ValueError(f"its MLPs have widths {hidden} in blocks of widths {dims}, expected one ratio")
    return ratio


def _count(shapes: Shapes, prefix: str) -> int:
    """How many numbered parts follow a prefix, counted from 0 to the first that is not there."""
    there = {key[len(prefix) :].partition(".")[0] for key in shapes if key.startswith(prefix)}
    return next(number for number in itertools.count() if str(number) not in there)


def _check_present(shapes: Shapes, axes: Mapping[str, int]) -> None:
    """Checks the keys that a configuration is read from: that they are there, with so many axes."""
    problems = [f"missing key {key}" for key in axes if key not in shapes]
    problems += [
        f"key {key} has shape {shapes[key]}, expected {count} axes"
        for key, count in axes.items()
        if key in shapes and len(shapes[key]) != count
    ]
    _refuse(problems, "model of this kind")


def _check_fit(shapes: Shapes, template: PyTree, table: Table, what: str) -> None:
    _refuse(misfits(template, shapes, table), what)


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(f"its arrays are not those of one {what}: {'; '.join(problems[:_LISTED])}{more}")


def _matching_preset(told: Mapping[str, Any], token_dim: int, grid: int) -> MARConfig | None:
    """The preset with exactly these shapes. No two have the same (a test says so)."""
    for preset in PRESETS.values():
        same = all(getattr(preset, field) == value for field, value in told.items())
        if same and (preset.token_dim, preset.grid_size) == (token_dim, grid):
            return preset
    return None


# What others claim.


def _claims_of_args(args: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    claims = {field: args[field] for field in _ARGUMENTS if field in args and field not in options}
    for field, value in claims.items():
        if type(value) is not int or value < 1:
            option = f"--{field.replace('_', '-')}"
            raise ValueError(f"{field}={value!r} according to its args, expected a positive integer; give {option}")
    if (model := args.get("model")) in REFERENCE_MODELS:
        claims |= {field: getattr(PRESETS[model], field) for field in _WIDTHS}
    return claims


def _check_told(field: str, value: Any, options: Mapping[str, Any], claims: Claims) -> None:
    """What a shape tells can only be confirmed; the option with its value silences wrong claims."""
    if field in options:
        if options[field] != value:
            raise ValueError(f"{field}={options[field]} is asked for, but its arrays have {field}={value}")
        return
    for who, fields in claims.items():
        if fields.get(field, value) != value:
            raise ValueError(
                f"{field}={fields[field]} according to {who}, but its arrays have {field}={value}; if these are right, "
                f"give --{field.replace('_', '-')} {value}"
            )


def _claimed(field: str, options: Mapping[str, Any], claims: Claims) -> int | None:
    """The value of a field that no shape tells; None if nobody says anything."""
    if field in options:
        return options[field]
    said = {who: fields[field] for who, fields in claims.items() if field in fields}
    if len(set(said.values())) > 1:
        texts = " and ".join(f"{field}={value} according to {who}" for who, value in said.items())
        raise ValueError(f"{texts}; give {'--num-heads' if field in _HEADS else '--' + field.replace('_', '-')}")
    return next(iter(said.values()), None)


def _heads(
    field: str, told: Mapping[str, Any], options: Mapping[str, Any], claims: Claims, match: MARConfig | None
) -> int:
    heads, dim = _claimed(field, options, claims), told[field.replace("num_heads", "embed_dim")]
    if heads is None and match is not None:
        heads = getattr(match, field)
    if heads is None:
        raise ValueError(
            f"{field} cannot be told from the arrays, and no preset has exactly these; give --num-heads, a divisor of "
            f"{dim}"
        )
    if heads < 1 or dim % heads:
        raise ValueError(f"{field}={heads} does not divide {field.replace('num_heads', 'embed_dim')}={dim}")
    return heads


def _patches(token_dim: int, options: Mapping[str, Any], claims: Claims, match: MARConfig | None) -> dict[str, int]:
    """Latent channels and patch size: token_dim = vae_embed_dim * patch_size^2."""
    possible = {side: token_dim // side**2 for side in range(1, math.isqrt(token_dim) + 1) if token_dim % side**2 == 0}
    channels, side = _claimed("vae_embed_dim", options, claims), _claimed("patch_size", options, claims)
    if channels is None and side is None:
        if match is not None:
            channels, side = match.vae_embed_dim, match.patch_size
        elif len(possible) > 1:
            texts = ", ".join(f"patch_size {p} with vae_embed_dim {c}" for p, c in possible.items())
            raise ValueError(f"its {token_dim} values per token can be {texts}; give --patch-size")
    fits = [(p, c) for p, c in possible.items() if p == (side or p) and c == (channels or c)]
    if not fits:
        said = [f"{name}={n}" for name, n in (("vae_embed_dim", channels), ("patch_size", side)) if n is not None]
        raise ValueError(
            f"{' and '.join(said)} do not make its {token_dim} values per token; give --vae-embed-dim and --patch-size"
        )
    return {"patch_size": fits[0][0], "vae_embed_dim": fits[0][1]}


def _sizes(
    latents: int, grid: int, options: Mapping[str, Any], claims: Claims, match: MARConfig | None
) -> dict[str, int]:
    """Image side and stride: img_size = latents * vae_stride, where `latents` are positions per side."""
    size, step = _claimed("img_size", options, claims), _claimed("vae_stride", options, claims)
    if size is None and step is None:
        if match is None or match.latent_size != latents:
            raise ValueError(
                f"its {grid} x {grid} tokens are {latents} x {latents} latents, of an image size that the arrays do "
                "not tell; give --img-size or --vae-stride"
            )
        size, step = match.img_size, match.vae_stride
    step = step or size // latents
    size = size or latents * step
    if step < 1 or size != latents * step:
        raise ValueError(
            f"img_size={size} and vae_stride={step} do not make its {latents} x {latents} latents; give --img-size "
            "and --vae-stride"
        )
    return {"img_size": size, "vae_stride": step}
