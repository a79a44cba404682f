"""Runs a command, and writes its exit code into a file: ``python watched.py FILE COMMAND...``.

All ends with the parent, however that ends. For the processes that torchrun starts: torchrun itself
waits up to five minutes for the other hosts when its own processes are done, and does not take them
along if it is killed.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent is dead."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    exit_code = subprocess.call(sys.argv[2:], preexec_fn=end_with_parent)
    Path(sys.argv[1]).write_text(f"{exit_code}\n")
    sys.exit(exit_code)
