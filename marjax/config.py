"""Model configurations: every static number of a model, checked when it is made.

The names are those of the reference code (LTH14/mar, `models/mar.py`). Sizes of the published models come from the
MAR paper (arXiv 2406.11838) and from the commands in the reference README.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from importlib import resources
from typing import Any

from marjax.noise_schedule import kept_timesteps

CFG_SCHEDULES = ("linear", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """KL autoencoder between images and latents (reference `models/vae.py`).

    Attributes:
        ch: base width of the convolutions.
        ch_mult: width multiplier per resolution level; each level but the last halves the resolution.
        num_res_blocks: residual blocks per level in the encoder (the decoder has one more).
        embed_dim: latent channels.
        scale: latents are multiplied by this after encoding and divided by it before decoding: 1 / their std.
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    embed_dim: int = 16
    scale: float = 0.2325

    def __post_init__(self):
        _check_positive_ints(self, ("ch", "num_res_blocks", "embed_dim"))
        if not self.ch_mult or any(not isinstance(m, int) or m < 1 for m in self.ch_mult):
            raise ValueError(f"ch_mult={self.ch_mult} must be a non-empty tuple of positive integers.")
        if not (_is_finite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r} must be a positive finite number.")

    @property
    def stride(self) -> int:
        """Pixels per latent position."""
        return 2 ** (len(self.ch_mult) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MARConfig:
    """A MAR model: shapes, head, diffusion, and the sampling defaults that belong to these weights.

    Attributes:
        img_size: image side in pixels.
        vae_stride: pixels per latent position (1 for pixel-space models).
        patch_size: latent positions per token side.
        vae_embed_dim: latent channels (image channels for pixel-space models).
        encoder_embed_dim, encoder_depth, encoder_num_heads: the encoder stack.
        decoder_embed_dim, decoder_depth, decoder_num_heads: the decoder stack.
        mlp_ratio: hidden width of the block MLPs over their width.
        class_num: number of classes; labels lie in [0, class_num).
        buffer_size: positions in front of the sequence that carry the class embedding.
        diffloss_d, diffloss_w: blocks and width of the diffusion head.
        clip_denoised: clip the predicted x0 to [-1, 1] while sampling. True for pixel-space models, whose data lie
            there; False for the reference checkpoints, which never clip.
        num_sampling_steps: default diffusion steps per token ("100", "a,b,c" or "ddimN").
        cfg, cfg_schedule, temperature: default guidance scale (1.0 is none), its schedule, and noise temperature.
        class_names: one name per class, or empty.
        vae: the autoencoder's configuration, or None for a pixel-space model (identity codec).
    """

    img_size: int = 256
    vae_stride: int = 16
    patch_size: int = 1
    vae_embed_dim: int = 16
    encoder_embed_dim: int = 768
    encoder_depth: int = 12
    encoder_num_heads: int = 12
    decoder_embed_dim: int = 768
    decoder_depth: int = 12
    decoder_num_heads: int = 12
    mlp_ratio: float = 4.0
    class_num: int = 1000
    buffer_size: int = 64
    diffloss_d: int = 6
    diffloss_w: int = 1024
    clip_denoised: bool = False
    num_sampling_steps: str = "100"
    cfg: float = 1.0
    cfg_schedule: str = "linear"
    temperature: float = 1.0
    class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # they would drown the rest
    vae: VAEConfig | None = None

    def __post_init__(self):
        _check_positive_ints(
            self,
            (
                *("img_size", "vae_stride", "patch_size", "vae_embed_dim", "class_num", "buffer_size"),
                *("encoder_embed_dim", "encoder_depth", "encoder_num_heads"),
                *("decoder_embed_dim", "decoder_depth", "decoder_num_heads"),
                *("diffloss_d", "diffloss_w"),
            ),
        )
        if self.img_size % (self.vae_stride * self.patch_size):
            raise ValueError(
                f"img_size={self.img_size} must be a multiple of vae_stride * patch_size = "
                f"{self.vae_stride} * {self.patch_size}."
            )
        for stack in ("encoder", "decoder"):
            dim, heads = getattr(self, f"{stack}_embed_dim"), getattr(self, f"{stack}_num_heads")
            if dim % heads:
                raise ValueError(f"{stack}_embed_dim={dim} must be a multiple of {stack}_num_heads={heads}.")
        if self.cfg_schedule not in CFG_SCHEDULES:
            raise ValueError(f"cfg_schedule={self.cfg_schedule!r} must be one of {', '.join(CFG_SCHEDULES)}.")
        if not isinstance(self.num_sampling_steps, str):
            raise ValueError(f"num_sampling_steps={self.num_sampling_steps!r} must be a string.")
        kept_timesteps(self.num_sampling_steps)
        for name, low in (("mlp_ratio", 0.0), ("cfg", -1.0), ("temperature", -1.0)):
            value = getattr(self, name)
            if not _is_finite(value) or value <= low or value < 0:
                raise ValueError(f"{name}={value!r} must be finite and {'>' if low == 0 else '>='} 0.")
        if not isinstance(self.class_names, tuple) or not all(isinstance(name, str) for name in self.class_names):
            raise ValueError(f"class_names={self.class_names!r} must be a tuple of strings.")
        if len({name.lower() for name in self.class_names}) < len(self.class_names):
            raise ValueError(f"class_names={self.class_names} must differ in more than case.")
        if not isinstance(self.clip_denoised, bool):
            raise ValueError(f"clip_denoised={self.clip_denoised!r} must be True or False.")
        if self.class_names and len(self.class_names) != self.class_num:
            raise ValueError(f"class_names has {len(self.class_names)} entries, expected class_num={self.class_num}.")
        if self.vae is not None and self.vae.embed_dim != self.vae_embed_dim:
            raise ValueError(f"vae.embed_dim={self.vae.embed_dim} must equal vae_embed_dim={self.vae_embed_dim}.")
        if self.vae is not None and self.vae.stride != self.vae_stride:
            raise ValueError(
                f"vae.ch_mult={self.vae.ch_mult} has {len(self.vae.ch_mult)} levels, so vae_stride={self.vae_stride} "
                f"must be {self.vae.stride}."
            )

    @property
    def grid_size(self) -> int:
        """Tokens per image side."""
        return self.img_size // (self.vae_stride * self.patch_size)

    @property
    def seq_len(self) -> int:
        """Image tokens per image (S)."""
        return self.grid_size**2

    @property
    def token_dim(self) -> int:
        """Values per token (D)."""
        return self.vae_embed_dim * self.patch_size**2

    @property
    def latent_size(self) -> int:
        """Latent positions per image side."""
        return self.img_size // self.vae_stride

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary; `from_dict` inverts it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MARConfig:
        """Builds a config from `to_dict`'s output.

        Raises:
            ValueError: on unknown or missing fields, or on values the config refuses.
        """
        if not isinstance(values, dict):
            raise ValueError(f"A model config must be a JSON object, got {type(values).__name__}.")
        _check_fields(cls, values)
        values = dict(values)
        values["class_names"] = tuple(values["class_names"])
        if values["vae"] is not None:
            _check_fields(VAEConfig, values["vae"])
            values["vae"] = VAEConfig(**{**values["vae"], "ch_mult": tuple(values["vae"]["ch_mult"])})
        return cls(**values)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _check_positive_ints(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")


def _check_fields(cls: type, values: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown, missing = sorted(set(values) - known), sorted(known - set(values))
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}.")


FASHION_MNIST_CLASSES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
# Index = label of ILSVRC 2012; source and licence are in NOTICE.
IMAGENET_CLASSES: tuple[str, ...] = tuple(
    json.loads((resources.files("marjax") / "assets" / "imagenet_classes.json").read_text(encoding="utf-8"))
)


def _latent_model(dim: int, depth: int, heads: int, head_depth: int, head_width: int, cfg: float) -> MARConfig:
    return MARConfig(
        encoder_embed_dim=dim,
        encoder_depth=depth,
        encoder_num_heads=heads,
        decoder_embed_dim=dim,
        decoder_depth=depth,
        decoder_num_heads=heads,
        diffloss_d=head_depth,
        diffloss_w=head_width,
        cfg=cfg,
        vae=VAEConfig(),
        class_names=IMAGENET_CLASSES,
    )


PRESETS: dict[str, MARConfig] = {
    # Table 3 of the paper and the evaluation commands of the reference README (cfg, temperature, head size).
    "mar_base": _latent_model(768, 12, 12, 6, 1024, cfg=2.9),
    "mar_large": _latent_model(1024, 16, 16, 8, 1280, cfg=3.0),
    "mar_huge": _latent_model(1280, 20, 16, 12, 1536, cfg=3.2),
    # The shipped pixel-space model.
    "fashion_mnist": MARConfig(
        img_size=28,
        vae_stride=1,
        patch_size=2,
        vae_embed_dim=1,
        encoder_embed_dim=128,
        encoder_depth=6,
        encoder_num_heads=2,
        decoder_embed_dim=128,
        decoder_depth=6,
        decoder_num_heads=2,
        class_num=10,
        buffer_size=8,
        diffloss_d=3,
        diffloss_w=192,
        clip_denoised=True,
        num_sampling_steps="50",
        cfg=4.0,
        temperature=0.95,
        class_names=FASHION_MNIST_CLASSES,
    ),
    # For tests and experiments: seconds to initialise, compile and run.
    "tiny": MARConfig(
        img_size=64,
        vae_stride=8,
        encoder_embed_dim=48,
        encoder_depth=5,
        encoder_num_heads=4,
        decoder_embed_dim=48,
        decoder_depth=5,
        decoder_num_heads=4,
        class_num=10,
        buffer_size=8,
        diffloss_d=3,
        diffloss_w=32,
        num_sampling_steps="10",
        cfg=3.0,
    ),
}


def get_preset(name: str) -> MARConfig:
    """Looks a preset up by name.

    Raises:
        ValueError: if there is no such preset; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}; expected one of {', '.join(PRESETS)}.")
    return PRESETS[name]
