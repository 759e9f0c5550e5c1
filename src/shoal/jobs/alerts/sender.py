"""Sends alerts from a thread of its own: a webhook that does not answer holds nobody up."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from shoal.spec.alerts.config import AlertConfig

TIMEOUT_S = 10.0
MAX_WAITING = 100
ENV = "env:"


class AlertSender:
    """Failures are kept for the driver's thread, which writes the events: see `take_failures`."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[AlertConfig, dict[str, Any]]] = queue.Queue(MAX_WAITING)
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

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait some seconds until everything is sent."""
        until = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            rule, content = self._waiting.get()
            try:
                deliver(rule, content, os.environ)
            except Exception as failure:
                self._failures.put(f"an alert ({rule.when}) was not delivered: {_without_address(failure)}")
            finally:
                self._waiting.task_done()


def deliver(rule: AlertConfig, content: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Send to the webhook and run the command, whichever the rule has. Raises what went wrong."""
    body = json.dumps(content).encode()
    if rule.webhook is not None:
        _post(_address(rule.webhook, environment), body)
    if rule.command is not None:
        told = {"SHOAL_ALERT": rule.when, "SHOAL_RUN": str(content["run"]), "SHOAL_TEXT": str(content["text"])}
        done = subprocess.run(
            rule.command,
            input=body,
            env={**environment, **told},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{rule.command[0]} ended with {done.returncode}: {''.join(last)[:200]}")


def _address(webhook: str, environment: Mapping[str, str]) -> str:
    if not webhook.startswith(ENV):
        return webhook
    found = environment.get(webhook.removeprefix(ENV), "")
    if not found.startswith(("http://", "https://")):
        raise RuntimeError(f"{webhook.removeprefix(ENV)} is no address in the driver's environment")
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *words: Any, **more: Any) -> None:
        return None


def _post(address: str, body: bytes) -> None:
    """The address is the job's own; a redirect is not followed."""
    request = urllib.request.Request(address, data=body, headers={"content-type": "application/json"})  # noqa: S310
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
        answer.read(1024)


def _without_address(failure: Exception) -> str:
    """Addresses of webhooks are secrets: they stay out of the events."""
    if isinstance(failure, urllib.error.HTTPError):
        return f"the webhook answers {failure.code}"
    if isinstance(failure, urllib.error.URLError):
        return f"the webhook cannot be reached: {failure.reason}"
    return f"{type(failure).__name__}: {failure}" if not isinstance(failure, RuntimeError) else str(failure)
