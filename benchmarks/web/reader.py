"""python -m benchmarks.web.reader URL TOKEN RUN: read the stream of a run and ask for its state, as an open page does.
A process of its own: it can be stopped, and does next to nothing itself."""

from __future__ import annotations

import http.client
import sys
import time

STATE_S = 2.0


def main(url: str, token: str, run: str) -> None:
    headers = {"authorization": f"Bearer {token}", "accept-encoding": "gzip"}
    host = url.removeprefix("http://")
    stream, questions = http.client.HTTPConnection(host), http.client.HTTPConnection(host)
    stream.request("GET", f"/api/v1/stream?runs={run}", headers=headers)
    rows = stream.getresponse()
    asked_s = time.monotonic()
    for _ in iter(rows.readline, b""):
        if time.monotonic() - asked_s >= STATE_S:
            asked_s = time.monotonic()
            questions.request("GET", f"/api/v1/runs/{run}", headers=headers)
            questions.getresponse().read()


if __name__ == "__main__":
    main(*sys.argv[1:])
