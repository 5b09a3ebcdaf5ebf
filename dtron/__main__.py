"""Entry point of `python -m dtron COMMAND ...`."""

import sys

from dtron.entry import commands

if __name__ == "__main__":
    sys.exit(commands())
