"""The port of a queue: users ask there, and machines offer their cores. Each proves a token; its name is the user's.

The queue belongs to the daemon's process, but every change of it is a transaction of its own, so each connection is
served in its own thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import IO

from shoal.errors import ShoalError, error, is_disk_full
from shoal.fleet.driver_address import DriverAddress, write_driver_address
from shoal.jobs.queue import client
from shoal.jobs.queue.access_tokens import MACHINE, TokenFields, TokenFile
from shoal.jobs.queue.network import frames
from shoal.jobs.queue.network.machines import Machine, MachinePool
from shoal.jobs.queue.network.messages import (
    BRIDGE,
    FROM_MACHINE,
    HELLO,
    REQUEST,
    ChangeRequest,
    ChannelHello,
    CompressionRequest,
    HistoryRequest,
    LeavingMessage,
    LookRequest,
    OfferHello,
    PingMessage,
    QueueHello,
    RefusedMessage,
    Request,
    ServedAnswer,
    SubmitRequest,
    ToMachine,
    encode,
    parse,
)
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.remote.code_archive import MAX_CODE_BYTES
from shoal.net.address import format_address, parse_address
from shoal.net.errors import ProtocolError
from shoal.net.file_transfer import receive_content
from shoal.net.handshake import new_token
from shoal.net.listener import AuthenticatedListener
from shoal.net.relay import CHUNK_BYTES, break_off, copy_until_end, finish_sending
from shoal.plan.queueing.entry import QueueEntry
from shoal.spec.certificates import TlsContexts
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.migrate import migrate_job
from shoal.spec.remote.code_directory import WrongCodeError, code_directory, unpack_code
from shoal.spec.remote.file_requests import CodeArchive

PING_S, SILENCE_S = 2.0, 10.0
"""A machine that says nothing for so long is lost."""
REQUEST_TIMEOUT_S = 60.0
LAST_WORDS_S = 5.0
"""For so long an agent may still report after it was told to end."""


def bind(listen: str, *, tls: bool) -> socket.socket:
    """Listen at ADDRESS:PORT of this machine. SH611 if that cannot be, or may not be without TLS."""
    try:
        host, port = parse_address(listen)
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        fix = "Write an IP address of this machine, such as 192.168.1.5:7411."
        raise error("SH611", f"'{listen}' is not ADDRESS:PORT", where="--listen", fix=fix) from None
    if address.is_unspecified:
        fix = "Name the address under which the others reach this machine."
        raise error("SH611", f"{host} is every address of this machine", where="--listen", fix=fix)
    if not (address.is_loopback or tls):
        fix = "Give --tls DIR with cert.pem, key.pem and ca.pem."
        raise error("SH611", f"{host} can be reached from other machines, without TLS", where="--listen", fix=fix)
    return _bind(str(address), port)


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as failure:
        listener.close()
        fix = "Choose another address or port."
        raise error("SH611", str(failure), where=format_address(host, port), fix=fix) from failure
    return listener


class QueueServer:
    """`address` is HOST:PORT. Runs of this machine get cores through `door`, a private file."""

    def __init__(self, paths: QueuePaths, listener: socket.socket, *, tls_contexts: TlsContexts | None) -> None:
        self.pool = MachinePool()
        self.door = paths.root / "machines.json"
        self._paths = paths
        self._tokens = TokenFile(paths.runs)
        self.host, port = listener.getsockname()[:2]
        self.address = format_address(self.host, port)
        inner, secret = _bind("127.0.0.1", 0), new_token()
        paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_driver_address(self.door, DriverAddress("127.0.0.1", inner.getsockname()[1], secret))
        self._listeners = [
            AuthenticatedListener([listener], self._key_of, self._serve, tls_contexts=tls_contexts),
            AuthenticatedListener([inner], secret, self._serve_bridge),
        ]

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self.pool.close()

    def _key_of(self, hello: bytes) -> str:
        with contextlib.suppress(ProtocolError, ShoalError):
            if found := self._tokens.find_by_key(parse(HELLO, hello).key):
                return found["sha256"]
        return new_token()

    def _serve(self, sock: socket.socket, hello: bytes) -> None:
        asked = parse(HELLO, hello)
        token = self._tokens.find_by_key(asked.key)
        is_machine = token is not None and token["role"] == MACHINE
        if token is None or is_machine == isinstance(asked, QueueHello):
            raise ProtocolError("the token is for something else")
        match asked:
            case QueueHello():
                with contextlib.closing(sock):
                    self._answer(sock, token)
            case OfferHello():
                with contextlib.closing(sock):
                    self._keep_machine(sock, asked, token["name"])
            case ChannelHello():  # from now on the socket is the channel's
                if not self.pool.connect(asked.channel, token["name"], sock):
                    raise ProtocolError("nobody waits for this channel")

    # ---- users ----

    def _answer(self, sock: socket.socket, token: TokenFields) -> None:
        sock.settimeout(REQUEST_TIMEOUT_S)
        request = frames.receive(sock, REQUEST)
        try:
            answer = self._carry_out(sock, request, token)
        except ShoalError as failure:
            answer = ServedAnswer(failure=failure.to_fields())
        frames.send(sock, answer)
        finish_sending(sock)
        copy_until_end(lambda: sock.recv(CHUNK_BYTES), lambda data: None)  # closing with unread bytes would discard it

    def _carry_out(self, sock: socket.socket, request: Request, token: TokenFields) -> ServedAnswer:
        runs = self._paths.runs
        match request:
            case LookRequest():
                view = client.look(runs)
                return ServedAnswer(
                    entries=list(view.entries.values()), quotas=view.quotas or {}, daemon_pid=os.getpid()
                )
            case HistoryRequest():
                return ServedAnswer(history=client.read_history(runs, request.number))
            case SubmitRequest():
                _require(token, "submit")
                return ServedAnswer(entries=[self._submit(sock, request, token["name"])])
            case CompressionRequest():
                _require(token, "submit")
                return ServedAnswer(entries=[self._submit_compression(request, token)])
            case ChangeRequest():
                return ServedAnswer(entries=[self._change(request, token)])

    def _submit(self, sock: socket.socket, request: SubmitRequest, user: str) -> QueueEntry:
        base_dir = self._receive_code(sock, request.code)
        job = received_job(request, base_dir)
        made = client.submit(
            [job],
            runs=self._paths.runs,
            user=user,
            priority=request.priority,
            after=request.after,
            work=request.work,
            start=False,
        )
        return made[0]

    def _submit_compression(self, request: CompressionRequest, token: TokenFields) -> QueueEntry:
        self._require_own(request.of, token)
        return client.submit_compression(
            str(request.of),
            runs=self._paths.runs,
            sets=request.sets,
            user=token["name"],
            priority=request.priority,
            after=request.after,
            start=False,
        )

    def _require_own(self, number: int, token: TokenFields) -> None:
        entry = client.look(self._paths.runs).entries.get(number)
        if entry is None:
            raise error("SH646", f"there is no job {number} in the queue")
        if entry.user != token["name"]:
            fix = "Ask its owner, or use a token with the role operate."
            raise error("SH659", f"job {number} is of {entry.user}, not of {token['name']}", fix=fix)

    def _receive_code(self, sock: socket.socket, archive: CodeArchive) -> Path:
        """The directory of a job on this machine. It is sent only if it is not there yet."""
        if archive.size_bytes > 2 * MAX_CODE_BYTES:
            raise error("SH655", f"{archive.size_bytes:,} bytes", where="the job's directory")
        try:
            with code_directory(self._paths.root / "code", archive) as (target, is_missing):
                frames.send(sock, ServedAnswer(code_wanted=is_missing))
                if is_missing:
                    with tempfile.TemporaryFile(dir=target.parent) as file:
                        _receive_archive(sock, file, archive.size_bytes)
                        unpack_code(file, archive, target)
        except WrongCodeError as failure:
            raise error("SH659", str(failure)) from failure
        except OSError as failure:
            code = "SH510" if is_disk_full(failure) else "SH642"
            raise error(code, str(failure), where=str(self._paths.root)) from failure
        return target

    def _change(self, request: ChangeRequest, token: TokenFields) -> QueueEntry:
        runs, number = self._paths.runs, request.number
        if token["role"] != "operate":
            _require(token, "submit")
            self._require_own(number, token)
        match request.what:
            case "cancel":
                return client.cancel(runs, number)
            case "release":
                return client.release(runs, number)
            case "priority":
                return client.set_priority(runs, number, request.priority)

    # ---- machines ----

    def _keep_machine(self, sock: socket.socket, hello: OfferHello, owner: str) -> None:
        """Until it is gone. Its silence is an end, too: what connects it may not say that it is gone."""
        lock = threading.Lock()

        def tell(message: ToMachine) -> None:
            with lock, contextlib.suppress(OSError):
                sock.sendall(encode(message) + b"\n")

        machine = Machine(
            hello.machine,
            owner,
            hello.cores,
            hello.memory_bytes,
            tell=tell,
            leave=lambda: break_off(sock),
            instance=hello.instance,
        )
        if not self.pool.join(machine):
            tell(RefusedMessage(why=f"{hello.machine} is taken: another machine offers cores under this name"))
            return
        try:
            tell(PingMessage())
            ping = partial(tell, PingMessage())
            for line in frames.read_lines(sock, pause_s=PING_S, silence_s=SILENCE_S, on_pause=ping):
                if isinstance(parse(FROM_MACHINE, line), LeavingMessage):
                    self.pool.leaving(machine)
        finally:
            self.pool.part(machine)

    def _serve_bridge(self, sock: socket.socket, hello: bytes) -> None:
        """Between a run's engine and the agent that it gets."""
        asked = parse(BRIDGE, hello)
        with contextlib.closing(sock):
            channel = self.pool.open(asked.run, asked.cores, is_wanted=lambda: _is_open(sock))
            if channel is None:
                return
            far = channel.sock
            assert far is not None
            try:
                back = threading.Thread(target=_copy, args=(far, sock), name="shoal-channel", daemon=True)
                back.start()
                _copy(sock, far)  # until the engine ends the agent
                back.join(LAST_WORDS_S)
            finally:
                break_off(far)
                far.close()
                self.pool.release(channel)


def received_job(request: SubmitRequest, base_dir: Path) -> Job:
    """The job as it was checked where it was submitted. Its code is not imported here."""
    try:
        data = migrate_job(request.job)
        return make_job({**data, "base_dir": str(base_dir)}, base_dir=str(base_dir), check_names=False)
    except (ValueError, TypeError, KeyError) as failure:
        raise error("SH659", f"the job cannot be read: {failure}") from failure


def _require(token: TokenFields, role: str) -> None:
    if token["role"] != role:
        fix = f"Ask for one with the role {role}: shoal tokens --create NAME --role {role}"
        raise error("SH659", f"the token of {token['name']} has the role {token['role']}", fix=fix)


def _receive_archive(sock: socket.socket, file: IO[bytes], size_bytes: int) -> None:
    left = size_bytes
    for chunk in receive_content(sock):
        left -= len(chunk)
        if left < 0:
            raise ProtocolError("the archive is longer than announced")
        file.write(chunk)
    file.seek(0)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    copy_until_end(lambda: source.recv(CHUNK_BYTES), sink.sendall)
    finish_sending(sink)


def _is_open(sock: socket.socket) -> bool:
    """Whether the other side of a connection is still there."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
