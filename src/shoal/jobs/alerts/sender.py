"""Sends alerts from a thread of its own: a webhook that does not answer holds nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.spec.alerts.config import AlertConfig

TIMEOUT_S = 10.0
"""A webhook and a command have so long each, from the first to the last byte."""
CLOSE_S = 2.5 * TIMEOUT_S
"""Longer than one delivery."""
MAX_WAITING = 100
ENV = "env:"


class AlertSender:
    """Failures are kept for the driver's thread, which writes the events: see `take_failures`."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[AlertConfig, dict[str, Any]] | None] = queue.Queue(MAX_WAITING)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, rule: AlertConfig, content: dict[str, Any]) -> None:
        if rule.webhook is None and rule.command is None:
            return
        try:
            self._waiting.put_nowait((rule, content))
        except queue.Full:
            self._failures.put(f"{MAX_WAITING} alerts wait to be sent: this one is dropped")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()

    def take_failures(self) -> list[str]:
        return [self._failures.get() for _ in range(self._failures.qsize())]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait some seconds until everything is sent. What is not is a failure that is told."""
        until = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        lost = self._waiting.unfinished_tasks
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
                self._waiting.task_done()
        if self._thread is not None:
            self._waiting.put(None)
        if lost:
            self._failures.put(f"alerts that were not delivered before the run ended: {lost}")

    def _work(self) -> None:
        while (found := self._waiting.get()) is not None:
            rule, content = found
            try:
                deliver(rule, content, os.environ)
            except DeliveryError as failure:
                self._failures.put(f"an alert ({rule.when}) was not delivered: {failure}")
            finally:
                self._waiting.task_done()
        self._waiting.task_done()


class DeliveryError(Exception):
    """What went wrong, without the address and the words of the command: they may be secrets."""


def deliver(rule: AlertConfig, content: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Send to the webhook and run the command, whichever the rule has. One that fails does not keep the other back.
    DeliveryError with what went wrong."""
    body, problems = json.dumps(content).encode(), []
    if rule.webhook is not None:
        problems.append(_try_webhook(rule.webhook, body, environment))
    if rule.command is not None:
        told = {"SHOAL_ALERT": rule.when, "SHOAL_RUN": str(content["run"]), "SHOAL_TEXT": str(content["text"])}
        problems.append(_try_command(rule.command, body, {**environment, **told}))
    if any(problems):
        raise DeliveryError("; ".join(filter(None, problems)))


def _try_command(command: Sequence[str], body: bytes, environment: Mapping[str, str]) -> str:
    """Why it failed, or ''."""
    try:
        done = subprocess.run(
            command,
            input=body,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} took longer than {TIMEOUT_S:g} s"
    except (OSError, ValueError) as failure:
        return f"{command[0]} cannot be started: {_reason(failure)}"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"{command[0]} ended with {done.returncode}: {''.join(last)[:200]}" if done.returncode else ""


def _try_webhook(webhook: str, body: bytes, environment: Mapping[str, str]) -> str:
    """Why it failed, or ''. In a thread that is left alone when the time is over: the time limits of sockets are for
    each part of an answer, and none bounds the search for the address of a name."""
    address, name = webhook, webhook.removeprefix(ENV)
    if webhook.startswith(ENV):
        address = environment.get(name, "").strip()
        if not address.startswith(("http://", "https://")):
            return f"{name} is no address in the driver's environment"
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_post(address, body)), name="webhook", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] if found else f"the webhook took longer than {TIMEOUT_S:g} s"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *words: Any, **more: Any) -> None:
        return None


def _post(address: str, body: bytes) -> str:
    """The address is the job's own; a redirect is not followed. Returns why it failed, or ''."""
    try:
        request = urllib.request.Request(address, data=body, headers={"content-type": "application/json"})  # noqa: S310
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as failure:
        return f"the webhook answers {failure.code}"
    except Exception as failure:  # an address from the environment may be anything
        return f"the webhook cannot be reached: {_reason(getattr(failure, 'reason', failure))}"
    return ""


def _reason(failure: object) -> str:
    """Without the text of the error, which may have parts of the address: its host, or what follows a space."""
    told = getattr(failure, "reason", None) if isinstance(failure, ssl.SSLError) else getattr(failure, "strerror", None)
    return str(told or type(failure).__name__)
