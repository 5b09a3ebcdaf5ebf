"""Train a model: torchrun --nproc-per-node N train.py --config FILE [section.key=value ...]"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until dtron.entry handles SIGINT
    from dtron.entry import train

    sys.exit(train())
