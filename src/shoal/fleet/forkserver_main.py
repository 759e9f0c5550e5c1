"""The fork server: one process that has all heavy modules imported and forks a worker in milliseconds.

It is started as `python -m shoal.fleet.forkserver_main FD MODULE...` and exchanges lines of JSON over the inherited
socket: it receives `start` and `kill`, and sends `born` and `gone`. It never runs worker code itself, so it stays
single-threaded and safe to fork. It exits when its driver is gone; workers notice that their parent has changed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # keep pages shared: a child's garbage collector does not touch them
    serve(control)
    os._exit(0)


def serve(control: socket.socket) -> None:
    """Serve until the driver closes its end of the socket."""
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_in, selectors.EVENT_READ)
    children: dict[int, str] = {}
    rest = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake_in:
                os.read(wake_in, 4096)
                _reap(control, children)
                continue
            try:
                data = control.recv(65536)
            except ConnectionResetError:  # the driver left data unread
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _handle(json.loads(line), control, children)


def _handle(command: dict[str, Any], control: socket.socket, children: dict[int, str]) -> None:
    if "start" in command:
        pid = os.fork()
        if pid == 0:
            _run_child(command, control)
        children[pid] = command["start"]
        _send(control, {"born": command["start"], "pid": pid})
    elif "kill" in command:
        for pid, key in children.items():
            if key == command["kill"]:
                os.kill(pid, signal.SIGKILL)


def _reap(control: socket.socket, children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _send(control, {"gone": children.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _run_child(command: dict[str, Any], control: socket.socket) -> NoReturn:
    """Runs in the child: set up session, output and environment, then call the entry's main()."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        control.close()
        os.setsid()
        for descriptor, file in ((1, command["output"]), (2, command["errors"])):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        os.environ.clear()
        os.environ.update(command["environment"])
        os.chdir(command["directory"])
        sys.argv = [command["entry"], *command["arguments"]]
        importlib.import_module(command["entry"]).main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
