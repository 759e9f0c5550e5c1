"""`python -m shoal.fleet.agents.tied_command PARENT COMMAND ...`: becomes the command; gets SIGTERM when PARENT dies.

For commands that wait in a cluster's queue on behalf of a driver: they must not wait on when it was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from shoal.fleet.forkserver_main import PR_SET_PDEATHSIG


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as failure:
        print(f"{command[0]}: {failure.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
