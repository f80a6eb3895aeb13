"""The header of a checkpoint: configuration, provenance, and a record of every array, as JSON that checks itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from marjax.config import MARConfig
from marjax.version import __version__

FORMAT = "marjax"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a header records of one array.

    Attributes:
        shape: its shape.
        dtype: "float32" or "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint says about itself.

    Attributes:
        config: the model's configuration.
        leaves: each array by its name, path components joined by "/".
        digests: SHA-256 of the stored content: of each array by its name in a single file, of each file by its path
            in a directory.
        preset: the preset that the model was made from, if any.
        provenance: where the weights come from: whatever the writer recorded, JSON values only.
        marjax_version: version of the package that wrote it.
    """

    config: MARConfig
    leaves: Mapping[str, Leaf]
    digests: Mapping[str, str]
    preset: str | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    marjax_version: str = __version__

    def to_json(self) -> str:
        """JSON text that carries a checksum of itself."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps({**values, "checksum": checksum(values)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        """Inverts `to_json`.

        Raises:
            ValueError: if the text is not such JSON, of another version, or altered. The message is a clause.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its header is not readable JSON ({error}); get a fresh copy") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError("its header was not written by marjax; give a checkpoint that marjax.save wrote")
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(
                f"it has format_version {version!r}, expected {FORMAT_VERSION}; read it with the marjax that wrote it"
            )
        recorded = values.pop("checksum", None)
        if recorded != checksum({"format": FORMAT, "format_version": version, **values}):
            raise ValueError("its header does not match its checksum, so it was damaged or edited; get a fresh copy")
        try:
            values["config"] = MARConfig.from_dict(values["config"])
            leaves = values["leaves"].items()
            values["leaves"] = {name: Leaf(tuple(leaf["shape"]), leaf["dtype"]) for name, leaf in leaves}
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its header is invalid ({error}); write it again with marjax.save") from error


def checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values in their canonical text."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
