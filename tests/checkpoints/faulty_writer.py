"""A process that writes files, and fails at one.

faulty_writer.py ACT NAME BYTES ...     ACT: full, die, orphan (kills its parent) or hang;
                                        NAME: a part of the file's path; BYTES: written before
"""

import errno
import os
import signal
import sys
import time

from dtron.io import writer_process as writer
from dtron.io.writer_process import HashedFile


def fail_at(act: str, name: str, beyond: int = 2000) -> None:
    """Fail in the middle of a file, when more bytes than `beyond` are written."""
    put = HashedFile.put

    def faulty(self: HashedFile, data: bytes | memoryview) -> None:
        if name not in self.target or self._bytes <= beyond:
            put(self, data)
        elif act == "full":
            self._file.write(bytes(data)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
        else:
            time.sleep(3600)

    HashedFile.put = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_at(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    del sys.argv[1:4]
    writer.main()
