"""torchrun --nproc-per-node N train.py --config FILE [section.key=value ...]"""

import sys

from dtron.entry import train

if __name__ == "__main__":
    sys.exit(train())
