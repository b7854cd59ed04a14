"""A sweep on a real cluster of two nodes, one of which is killed."""
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from conftest import BIN, SET, essence, finish, tce, waiting_loss

OPEN = {"RAY_AUTH_MODE": "disabled"}  # whatever token this user has


def start_node(folder, *options):
    "A node process of its own"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", **OPEN}
    return subprocess.Popen([str(BIN/"ray"), "start", "--block", "--num-cpus=1", "--disable-usage-stats",
                             "--node-ip-address=127.0.0.1", *options], env=environment,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def kill(node):
    "Everything that belongs to a node, at once"
    family = [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
    for process in family:
        try: process.kill()
        except psutil.NoSuchProcess: pass
    node.wait()


def wait_for_nodes(count, address):
    "Until a cluster has so many nodes"
    for _ in range(60):
        time.sleep(1)
        said = subprocess.run([str(BIN/"ray"), "status", f"--address={address}"], capture_output=True, text=True,
                              env={**os.environ, **OPEN}).stdout
        if len(re.findall(r"(?m)^ 1 node_", said)) == count: return
    pytest.fail(f"no cluster of {count} nodes: {said}")


@pytest.fixture
def cluster():
    "The address of a cluster, its second node, and the nodes' folder"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = Path(tempfile.mkdtemp(prefix="tce", dir="/tmp"))  # sockets need a short path
    head = start_node(folder, "--head", f"--port={address.split(':')[1]}", "--include-dashboard=false")
    wait_for_nodes(1, address)
    second = start_node(folder, f"--address={address}")
    wait_for_nodes(2, address)
    yield address, second, folder
    for node in (second, head):
        if node.poll() is None: kill(node)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_dies_and_nothing_is_lost(cluster, tmp_path):
    address, second, folder = cluster
    results, alone, wait = tmp_path/"results", tmp_path/"alone", tmp_path/"wait"
    cells = ["sweep", "--preset", "smoke", "--seeds", 1, "--eta", 0, 0.4, "--loss", waiting_loss(tmp_path), *SET]
    wait.touch()
    sweep = tce(*cells, "--ray", address, "--results", results, env=OPEN)
    end = time.time() + 400  # it costs nothing to be patient
    while len(list(folder.rglob("*.progress"))) < 2 and time.time() < end and sweep.poll() is None:
        time.sleep(0.2)  # both nodes are under way
    assert sweep.poll() is None and len(list(folder.rglob("*.progress"))) == 2
    kill(second)
    wait.unlink()
    said = finish(sweep, timeout=400)
    assert said.count(" done ") == 4
    finish(tce(*cells, "--results", alone))
    assert essence(results) == essence(alone)
    for name in essence(alone): assert (results/"records"/f"{name}.ipynb").exists()
