"""A process that writes files, and fails at one.

faulty_writer.py ACT NAME ...     ACT: full, die or hang; NAME: a part of the file's path
"""

import errno
import os
import signal
import sys
import time

from dtron import writer
from dtron.writer import HashedFile


def fail_at(act: str, name: str) -> None:
    put = HashedFile.put

    def faulty(self: HashedFile, data: bytes | memoryview) -> None:
        if name not in self.target or self._bytes <= 2000:
            put(self, data)
        elif act == "full":
            self._file.write(bytes(data)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(3600)

    HashedFile.put = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_at(sys.argv[1], sys.argv[2])
    del sys.argv[1:3]
    writer.main()
