"""Several nodes of Ray on this machine, on loopback. The cluster lives in a process of its own."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every node is at 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default actors get what others leave, which is nothing on a busy machine
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
}
"""For whoever starts or uses the nodes."""
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = {}
def tell(**fields):
    print(json.dumps(fields), flush=True)
def add():
    for attempt in (1, 2):  # a node whose helpers are slow aborts
        try:
            node = cluster.add_node(num_cpus=2)
            break
        except Exception:
            if attempt == 2:
                raise
    nodes[node.node_id] = node
for _ in range(int(sys.argv[1])):
    add()
import ray
ray.init(address=cluster.address, log_to_driver=False, namespace="test")
def raylet(node):
    return node.all_processes["raylet"][0].process.pid
tell(address=cluster.address)
for line in sys.stdin:
    words = json.loads(line)
    if words["do"] == "add":
        add()
        tell(done=True)
    elif words["do"] == "nodes":
        tell(nodes={one.node_id: raylet(one) for one in nodes.values()})
    elif words["do"] == "groups":
        table = ray.util.placement_group_table()
        tell(groups={g["name"]: [g["state"], list(g["bundles_to_node_id"].values())] for g in table.values()})
    elif words["do"] == "tables":
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list
        state = ray._private.state
        told = [state.actors(), state.jobs(), state.node_ids(), ray.util.placement_group_table()]
        for namespace in (None, b"fun", b"job", b"session", b"dashboard", b"serve", b"tune"):
            for key in _internal_kv_list(b"", namespace=namespace):
                told += [key, _internal_kv_get(key, namespace=namespace)]
        tell(tables=repr(told))
    elif words["do"] == "session":
        tell(directory=ray._private.worker._global_node.get_session_dir_path())
    elif words["do"] == "actors":
        table = ray._private.state.actors().values()
        tell(actors=[[one["ActorClassName"], one["State"]] for one in table])
    elif words["do"] == "drain":
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        import time
        client = GcsClient(address=cluster.address)
        accepted, why = client.drain_node(words["node"], reason, "test", int(time.time() * 1000) + 600_000)
        tell(done=accepted, why=why)
    elif words["do"] == "end":
        break
ray.shutdown()
cluster.shutdown()
"""


class RayNodes:
    def __init__(self, process, address):
        self._process = process
        self.address = address

    def ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(self._process)

    @staticmethod
    def _answer(process):
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    return found
        raise AssertionError("the cluster ended")

    def groups(self):
        """Placement groups that wait or exist: the nodes of each, by name."""
        return {name: nodes for name, (_, nodes) in self.states_of_groups().items()}

    def states_of_groups(self):
        """State and nodes of each of them."""
        found = self.ask(do="groups")["groups"]
        return {name: [state, nodes] for name, (state, nodes) in found.items() if state != "REMOVED"}

    def logs(self):
        """The directory in which Ray keeps the logs of all nodes."""
        return Path(self.ask(do="session")["directory"]) / "logs"

    def states_of_agents(self):
        return sorted(state for name, state in self.ask(do="actors")["actors"] if name == "AgentActor")


@contextlib.contextmanager
def ray_nodes(count, log):
    environment = os.environ | ENVIRONMENT
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
    with process:
        try:
            yield RayNodes(process, RayNodes._answer(process)["address"])
        finally:
            with contextlib.suppress(OSError):
                process.stdin.write('{"do": "end"}\n')
                process.stdin.flush()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
