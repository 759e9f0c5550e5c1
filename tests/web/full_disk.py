"""The page over runs on a disk that is full, and on one that cannot be written. Started by `unshare -rm`, so that it
may mount the disk: python -m tests.web.full_disk DIRECTORY. Prints one JSON object: what the page answered."""

import json
import subprocess
import sys
from pathlib import Path

from shoal.events import Event
from shoal.events.stream import format_event
from shoal.spec.run_paths import RunPaths
from tests.jobs.past_run import TOLD, write_run
from tests.web.conftest import Served

READ = ("runs", "runs/mlp-1", "runs/mlp-1/series?names=loss", "runs/mlp-1/timeline", "runs/mlp-1/receipt", "storage")
CHANGES = {
    "storage/plan": {"days": 0, "keep": "0"},
    "runs/mlp-1/tags": {"add": ["best"]},
    "runs/mlp-1/compact": {},
}
GO = ("gone-1", "gone-2")


def main():
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    steps = [("step", "worker-0", n, {"loss": 2.3 / n, "samples": 50, "wall_s": 0.01}) for n in range(1, 3001)]
    paths = write_run(disk / "mlp-1", [*TOLD[:4], *steps, *TOLD[64:]])
    with paths.events.open("ab") as file:
        reason = {"reason": "No space left on device", "code": "SH510"}
        file.write(format_event(Event("save_failed", 1.7e9 + 5000, "worker-0", 3000, reason)))
    for name in GO:
        gone = write_run(disk / name)
        gone.lock.touch(0o600)  # as every run has it that was driven
        (gone.root / "model.bin").write_bytes(b"x" * (100 << 10))
    served = Served(disk)
    client = served.client("operate")
    fill(disk)
    found = {"full": ask(client), "freed": free(client, disk)}
    (disk / "filler").unlink()
    found["room"] = ask(client)
    found["files"] = sorted(str(path.relative_to(disk)) for path in disk.rglob("*tmp*"))
    client.post("/api/v1/runs/mlp-1/compact", json={"undo": True})
    client.post("/api/v1/runs/mlp-1/tags", json={"remove": ["best"]})
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    found["read-only"] = ask(client)
    found["whole"] = RunPaths(disk / "mlp-1").events.read_bytes().count(b'"kind":"step"')
    print(json.dumps(found))
    served.site.close()


def free(client, disk):
    """Delete runs on the full disk: to the empty trash, for good, then to the trash, for which there is room now."""
    asked = [("gone-1", {}), ("gone-1", {"for_good": True}), ("gone-2", {})]
    answers, entries = [], []
    for name, more in asked:
        one = client.post(f"/api/v1/runs/{name}/delete", json={"confirm": name, **more})
        answers.append([one.status_code, one.json().get("code", ""), one.json().get("fix", "")])
        entries.append(sorted(path.name for path in disk.glob(".trash/*/*")))
    client.post("/api/v1/trash/empty", json={"confirm": "empty"})
    return {
        "answers": answers,
        "entries": entries,
        "runs": sorted(path.name for path in disk.iterdir() if path.is_dir() and not path.name.startswith(".")),
        "free_bytes": client.get("/api/v1/storage").json()["free_bytes"],
        "left": [path.name for path in (disk / ".trash").iterdir() if path.name != "plans"],
    }


def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def ask(client):
    answers = {path: client.get(f"/api/v1/{path}") for path in READ}
    changes = {path: client.post(f"/api/v1/{path}", json=body) for path, body in CHANGES.items()}
    return {
        "read": {path: one.status_code for path, one in answers.items()},
        "notes": answers["runs/mlp-1"].json()["notes"],
        "free_bytes": answers["storage"].json()["free_bytes"],
        "changes": {path: [one.status_code, one.json().get("code", "")] for path, one in changes.items()},
    }


if __name__ == "__main__":
    main()
