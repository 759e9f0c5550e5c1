"""A queue on another machine: the same verbs, asked at its port."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import error, error_from_fields
from shoal.jobs.queue.access_tokens import name_of_key, token_digest
from shoal.jobs.queue.client import QueueView
from shoal.jobs.queue.network import frames
from shoal.jobs.queue.network.messages import (
    ANSWER,
    ChangeRequest,
    CompressionRequest,
    HistoryRequest,
    LookRequest,
    QueueHello,
    Request,
    ServedAnswer,
    SubmitRequest,
    encode,
)
from shoal.jobs.queue.queue_store import HistoryRow
from shoal.jobs.remote.code_archive import archive_name, pack_code
from shoal.net.address import parse_address
from shoal.net.errors import LinkError, TlsError, TokenError
from shoal.net.file_transfer import MAX_CHUNK_BYTES, send_content
from shoal.net.listener import connect_host
from shoal.plan.queueing.entry import QueueEntry
from shoal.plan.queueing.work import TRAINING, Work
from shoal.spec.certificates import TlsContexts, load_tls_contexts
from shoal.spec.job import Job

QUEUE_VARIABLE, TOKEN_VARIABLE, TLS_VARIABLE = "SHOAL_QUEUE", "SHOAL_QUEUE_TOKEN", "SHOAL_QUEUE_TLS"
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class QueueAddress:
    """Where a queue is served, and with which token and certificates it is asked."""

    host: str
    port: int
    token: str
    contexts: TlsContexts | None

    @classmethod
    def of(cls, where: str, token: str, tls: Path | None) -> QueueAddress:
        """SH609 if it is no address, SH615 if there is no token."""
        try:
            host, port = parse_address(where)
        except ValueError as failure:
            raise error("SH609", str(failure), where=where, fix="Write HOST:PORT, as `shoal up` shows it.") from failure
        if not token:
            fix = "Ask the owner of the queue for one: shoal tokens --create NAME --role submit"
            raise error("SH615", "there is no token", where=TOKEN_VARIABLE, fix=fix)
        return cls(host, port, token, load_tls_contexts(tls, where="the certificates") if tls else None)

    @property
    def key(self) -> str:
        return token_digest(self.token)

    def connect(self, hello: bytes) -> socket.socket:
        """SH610, SH615 or SH620 if that fails."""
        where = f"{self.host}:{self.port}"
        try:
            return connect_host(self.host, self.port, self.key, hello, tls_contexts=self.contexts)
        except TokenError as failure:
            raise error("SH615", "the queue does not know this token", where=where) from failure
        except TlsError as failure:
            raise error("SH620", str(failure), where=where) from failure
        except LinkError as failure:
            fix = "Is `shoal up --listen` running there, and does the firewall let you through?"
            raise error("SH610", f"no queue answers: {failure}", where=where, fix=fix) from failure


def address_of_environment(environment: Mapping[str, str] = os.environ) -> QueueAddress | None:
    """The queue that SHOAL_QUEUE names; None if the queue is the one of this machine."""
    where = environment.get(QUEUE_VARIABLE, "")
    if not where:
        return None
    tls = environment.get(TLS_VARIABLE, "")
    return QueueAddress.of(where, environment.get(TOKEN_VARIABLE, ""), Path(tls) if tls else None)


class RemoteQueue:
    """See `client` for what the verbs mean. The user of a job is the one whose token it is."""

    def __init__(self, address: QueueAddress) -> None:
        self._address = address

    def submit(
        self, job: Job, *, user: str = "", priority: int = 0, after: Sequence[int] = (), work: Work = TRAINING
    ) -> QueueEntry:
        """The directory of the job is sent too, unless the queue has it already."""
        _refuse_user(user)
        with tempfile.TemporaryDirectory(prefix="shoal-submit-") as scratch:
            archive = pack_code(Path(job.base_dir), Path(scratch))
            request = SubmitRequest(job=job.dump(), work=work, priority=priority, after=list(after), code=archive)
            return self._ask(request, send=Path(scratch) / archive_name(archive)).entries[0]

    def submit_compression(
        self, parent: str, sets: Sequence[str], *, user: str = "", priority: int = 0, after: Sequence[int] = ()
    ) -> QueueEntry:
        """Of what one of the user's own jobs trains: runs of others are nobody's business."""
        _refuse_user(user)
        if not parent.isdecimal():
            fix = "Name a job of the queue by its number: shoal submit 3 --compress"
            raise error("SH609", f"'{parent}' is not the number of a job", where="--compress", fix=fix)
        request = CompressionRequest(of=int(parent), sets=list(sets), priority=priority, after=list(after))
        return self._ask(request).entries[0]

    def look(self) -> QueueView:
        answer = self._ask(LookRequest())
        return QueueView({entry.id: entry for entry in answer.entries}, answer.daemon_pid, answer.quotas)

    def history(self, number: int | None = None) -> list[HistoryRow]:
        return self._ask(HistoryRequest(number=number)).history

    def cancel(self, number: int) -> QueueEntry:
        return self._ask(ChangeRequest(number=number, what="cancel")).entries[0]

    def release(self, number: int) -> QueueEntry:
        return self._ask(ChangeRequest(number=number, what="release")).entries[0]

    def set_priority(self, number: int, priority: int) -> QueueEntry:
        return self._ask(ChangeRequest(number=number, what="priority", priority=priority)).entries[0]

    def _ask(self, request: Request, *, send: Path | None = None) -> ServedAnswer:
        hello = encode(QueueHello(key=name_of_key(self._address.key)))
        with contextlib.closing(self._address.connect(hello)) as sock:
            sock.settimeout(ANSWER_TIMEOUT_S)
            try:
                frames.send(sock, request)
                answer = frames.receive(sock, ANSWER, most=frames.MAX_ANSWER_BYTES)
                if send is not None and not answer.failure:
                    if answer.code_wanted:
                        send_content(sock, _chunks(send))
                    answer = frames.receive(sock, ANSWER)
            except LinkError as failure:
                where = f"{self._address.host}:{self._address.port}"
                raise error("SH610", f"the queue gave no answer: {failure}", where=where) from failure
        if answer.failure:
            raise error_from_fields(answer.failure)
        return answer


def _refuse_user(user: str) -> None:
    if user:
        fix = "Leave it out: the user is the name of the token."
        raise error("SH609", "users of a queue on another machine have tokens", where="--user", fix=fix)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(MAX_CHUNK_BYTES):
            yield data
