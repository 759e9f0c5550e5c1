"""A cluster of Ray on this machine that grows and shrinks: Ray's own autoscaler, whose nodes are processes here.

`ray.cluster_utils.AutoscalingCluster` is not used: it ends every Ray of this machine, and needs a file that the package
lacks.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.fleet.ray_nodes import ENVIRONMENT, RayNodes

HEAD = "f" * 51 + "00000"
IDLE_S = 6
SETTINGS = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
}
WATCHER = """
import json, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, namespace="test")
print("{}", flush=True)
for line in sys.stdin:
    words = json.loads(line)
    if words["do"] == "nodes":
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        print(json.dumps({"nodes": alive}), flush=True)
    elif words["do"] == "groups":
        table = ray.util.placement_group_table()
        groups = {g["name"]: [g["state"], list(g["bundles_to_node_id"].values())] for g in table.values()}
        print(json.dumps({"groups": groups}), flush=True)
"""
LISTS = "initialization_commands setup_commands head_setup_commands worker_setup_commands head_start_ray_commands"
LISTS += " worker_start_ray_commands cluster_synced_files rsync_exclude rsync_filter"


def configuration(address, max_nodes):
    """No node at first; one of one core for each core that is asked for."""
    provider = {"type": "fake_multinode", "gcs_address": address, "use_node_id_as_ip": True}
    provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
    resources = {"CPU": 1, "object_store_memory": 100_000_000}
    return {
        "cluster_name": "shoal",
        "max_workers": max_nodes,
        "provider": provider,
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "one": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": max_nodes},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in LISTS.split()},
    }


@contextlib.contextmanager
def autoscaled_ray(max_nodes, log):
    place = Path(tempfile.mkdtemp(prefix="shoal-ray-"))  # short: Ray puts sockets there
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    address = f"127.0.0.1:{port}"
    (place / "config.json").write_text(json.dumps(configuration(address, max_nodes)))
    environment = os.environ | ENVIRONMENT | SETTINGS
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory=100000000", f"--autoscaling-config={place}/config.json", f"--temp-dir={place}"]
    try:
        with log.open("w") as file:
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True)
            watcher = subprocess.Popen(
                [sys.executable, "-c", WATCHER, address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                text=True,
            )
        with watcher:
            RayNodes._answer(watcher)
            yield RayNodes(watcher, address)
            watcher.stdin.close()
    finally:
        end_all(place)
        shutil.rmtree(place, ignore_errors=True)


def end_all(place):
    """Everything that this cluster started has its directory in its command or environment."""
    doomed = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if str(place) in " ".join(process.info["cmdline"] or []):
                doomed += [process, *process.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=30)
