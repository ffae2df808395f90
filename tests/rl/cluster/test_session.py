"""A cluster that a run starts is its own: on loopback, quiet, with room for what was asked, and gone with the run."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ClusterConfig, Config
from paceline.rl.cluster.session import RayCluster
from paceline.schema import PacelineError
from ports import free_port

SCRIPT = """
import os, sys
from pathlib import Path
from paceline.config import ClusterConfig, Config
from paceline.rl.cluster.session import RayCluster

def family():
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found

def listening():
    inodes = set()
    for pid in family():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                yield fields[1].rsplit(":", 1)[0]

first = RayCluster(Config(cluster=ClusterConfig(kind="ray", rollout_workers=5)))
second = RayCluster(Config(cluster=ClusterConfig(kind="ray", rollout_workers=5)))
print(*sorted(set(listening())))
first.close()
first.close()
print(second.ray.cluster_resources()["CPU"], second.node == second.ray.get_runtime_context().get_node_id())
second.close()
print(second.ray.is_initialized(), family() == {os.getpid()})
"""


@pytest.mark.ray
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_a_cluster_of_its_own_listens_on_loopback_only_and_leaves_no_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    addresses, amounts, ends = done.stdout.splitlines()
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert addresses
    assert set(addresses.split()) <= loopback
    assert amounts == "5.0 True"
    assert ends == "False True"


def test_amounts_that_this_machine_cannot_have_are_refused():
    with pytest.raises(PacelineError, match=r"cluster.resources=\{'tpu': 1.0\} are of a cluster that was started with"):
        RayCluster(Config(cluster=ClusterConfig(kind="ray", resources={"tpu": 1.0})))
    with pytest.raises(PacelineError, match=r"cluster.worker_gpus: 2000 GPUs are asked for, there are"):
        RayCluster(Config(cluster=ClusterConfig(kind="ray", worker_gpus=1000.0)))


def test_a_cluster_that_is_not_there_is_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(PacelineError, match=rf"cluster.address={address}: Ray is not at {address}: .*refused"):
        RayCluster(Config(cluster=ClusterConfig(kind="ray", address=address)))


def test_without_ray_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PacelineError, match=r"cluster.kind=ray: Ray is not installed; pip install 'paceline\[ray\]'"):
        RayCluster(Config(cluster=ClusterConfig(kind="ray")))
