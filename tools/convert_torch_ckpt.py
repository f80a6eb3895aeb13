"""Converts PyTorch weights of MAR from a clone of this repository: `marjax convert` under another name.

Example:

    python tools/convert_torch_ckpt.py checkpoint-last.pth mar_base --vae kl16.ckpt --dtype bfloat16
"""

from __future__ import annotations

import sys

from marjax.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    sys.exit(main())
