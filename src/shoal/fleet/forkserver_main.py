"""The fork server: one process that has all heavy modules imported and forks a worker in milliseconds.

A process that is tied to the fork server is killed by the kernel when the fork server ends, however that happens.

It is started as `python -m shoal.fleet.forkserver_main FD MODULE...` and exchanges lines of JSON over the inherited
socket: it receives `start`, `kill`, `import` and `hold`, and sends `ready`, `born` and `gone`. It never runs code of a
worker itself, so it stays single-threaded and safe to fork. What it holds is opened in its own thread. It exits when
its driver is gone, and then starts nothing that was asked for while it imported: the next driver of a run looks for
processes once, and would not find one that is born later. Workers notice that their parent has changed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from shoal.errors import describe_exception, error, fork_error, traceback_text
from shoal.fleet.platform_facts import platform_facts

PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    serve(control, _import_modules(sys.argv[2:], control))
    os._exit(0)


def _import_modules(modules: list[str], control: socket.socket) -> dict[str, BaseException]:
    """Import the modules, and return the failures by module: only a process whose entry failed cannot be started. The
    others import what they need themselves, and report what they lack."""
    failures: dict[str, BaseException] = {}
    gc.disable()  # what is imported stays: looking for garbage in it takes an eighth of the time
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as failure:
            failures[module] = failure
    gc.enable()
    gc.collect()
    gc.freeze()  # keep pages shared: a child's garbage collector does not touch them
    _send(control, {"ready": True, "platform": platform_facts()})
    return failures


def serve(control: socket.socket, failures: dict[str, BaseException]) -> None:
    """Serve until the driver closes its end of the socket."""
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child gets it when it can handle it
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
                if _has_hung_up(control):
                    return
                _handle(json.loads(line), control, children, failures)


def _has_hung_up(control: socket.socket) -> bool:
    """Whether the other end is closed, even if it left commands behind."""
    poll = select.poll()
    poll.register(control, 0)  # a hang-up is always told
    return bool(poll.poll(0))


def _handle(
    command: dict[str, Any], control: socket.socket, children: dict[int, str], failures: dict[str, BaseException]
) -> None:
    if "start" in command:
        failure = failures.get(command["entry"])
        if failure is None:
            _start(command, control, children)
        else:
            _report_failed_import(command, control, failure)
    elif "import" in command:
        failures.update(_import_modules(command["import"], control))
    elif "hold" in command:
        with contextlib.suppress(Exception):  # a worker opens it itself, and reports what is wrong
            importlib.import_module(command["hold"]).hold(command["argument"])
            gc.freeze()
    elif "kill" in command:
        for pid, key in children.items():
            if key == command["kill"]:
                os.kill(pid, signal.SIGKILL)


def _start(command: dict[str, Any], control: socket.socket, children: dict[int, str]) -> None:
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as failure:
        _send(control, {"gone": command["start"], "code": 1, "error": fork_error(failure).to_fields()})
        return
    if pid == 0:
        _run_child(command, control, parent)
    children[pid] = command["start"]
    _send(control, {"born": command["start"], "pid": pid})


def _report_failed_import(command: dict[str, Any], control: socket.socket, failure: BaseException) -> None:
    """Tell the driver, and write the traceback to the log that the process would have had."""
    with contextlib.suppress(OSError), open(command["errors"], "a", encoding="utf-8") as log:
        log.write(traceback_text(failure))
    frames = traceback.extract_tb(failure.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    package = failure.name if isinstance(failure, ModuleNotFoundError) else None
    fix = f"Install the package {package} for {sys.executable}." if package else ""
    message = f"importing {command['entry']} failed: {describe_exception(failure)}"
    told = error("SH629", message, where=where, fix=fix)
    _send(control, {"gone": command["start"], "code": 1, "error": told.to_fields()})


def _reap(control: socket.socket, children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _send(control, {"gone": children.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _tie_to(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _run_child(command: dict[str, Any], control: socket.socket, parent: int) -> NoReturn:
    """Runs in the child: set up session, output and environment, then call the entry's main()."""
    code = 1
    try:
        if command["tied"]:
            _tie_to(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        control.close()
        os.setsid()
        for descriptor, file in ((1, command["output"]), (2, command["errors"])):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        faulthandler.enable()  # a crash in C code leaves the Python line in the log
        os.environ.clear()
        os.environ.update(command["environment"])
        os.chdir(command["directory"])
        sys.argv = [command["entry"], *command["arguments"]]
        entry = importlib.import_module(command["entry"])
        signal.signal(signal.SIGTERM, getattr(entry, "on_early_sigterm", signal.SIG_DFL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        entry.main()
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
