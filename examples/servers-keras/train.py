"""Train a Keras network on several workers against servers: python examples/servers-keras/train.py"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}

import keras
from images import digits
from network import adopt, network, variables

import shoal.server

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="", help="a directory with the files of MNIST; without it digits are made up")
parser.add_argument("--workers", type=int, default=3)
parser.add_argument("--servers", type=int, default=2)
parser.add_argument("--staleness", default="0", help="0, a number of steps, or inf")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--kill", action="store_true", help="kill a server on the way")
parser.add_argument("--python", help="the interpreter that servers run in, if this one has no torch")
given = parser.parse_args()

keras.utils.set_random_seed(0)
model = network()
servers = shoal.server.start(
    {name: variable.numpy() for name, variable in variables(model).items()},
    optimizer={"name": "Adam", "args": {"lr": 0.001}},
    workers=given.workers,
    servers=given.servers,
    staleness=given.staleness if given.staleness == "inf" else int(given.staleness),
    python=given.python,
)
with servers:
    began = time.perf_counter()
    command = [sys.executable, str(Path(__file__).with_name("network.py")), servers.address, f"--data={given.data}"]
    command += [f"--workers={given.workers}", f"--steps={given.steps}"]
    environment = os.environ | {"SHOAL_TOKEN": servers.token}
    workers = [subprocess.Popen([*command, f"--worker={i}"], env=environment) for i in range(given.workers)]
    if given.kill:
        name, process = sorted(servers.processes.items())[0]
        os.kill(process, signal.SIGKILL)
        print(f"killed {name}, process {process}")
    if any(worker.wait() for worker in workers):
        sys.exit("a worker failed")
    adopt(model, servers.pull())
    print(f"{given.steps} steps of {given.workers} workers in {time.perf_counter() - began:.1f} s")

images, labels = digits(given.data, "t10k")
print(f"accuracy {(model.predict(images, verbose=0).argmax(1) == labels).mean():.3f}")
