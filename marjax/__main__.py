"""`python -m marjax`, the same as the command `marjax`."""

import sys

from marjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
