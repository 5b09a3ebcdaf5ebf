"""torchrun --nproc-per-node N train.py --config FILE [section.key=value ...]"""

import sys

from dtron.cli import main

if __name__ == "__main__":
    sys.exit(main())
