"""launch.sh --nnodes 2 --head ADDR on two hosts: network namespaces, joined by a cable that can be cut."""

import contextlib
import os
import re
import subprocess
import time

import psutil
import pytest
import torch
from conftest import ROOT, need, run, start, wait_until

DDP = ROOT / "recipes/ddp_resnet.py"
HEAD, PEER = "10.213.7.1", "10.213.7.2"
MODEL = "--data digits --arch resnet18 --image-size 16 --batch-size 32 --lr 0.01 --norm group --log-every 1"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    def __init__(self):
        self.names = {HEAD: f"head-{os.getpid()}", PEER: f"peer-{os.getpid()}"}

    def __enter__(self):
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        head, peer = self.names.values()
        ip("link", "add", "cable", "netns", head, "type", "veth", "peer", "name", "cable", "netns", peer)
        for address, name in self.names.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        self.cable("up")
        return self

    def __exit__(self, *_):
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def cable(self, state):
        for name in self.names.values():
            ip("-n", name, "link", "set", "cable", state)

    def launch(self, cwd, host, *words):
        """The guide's command for nodes without Slurm, with what the test needs in place of its recipe."""
        (line,) = re.findall(r"(?m)^\./(launch.sh --nnodes .*) recipes/", (ROOT / "README.md").read_text())
        command = str(ROOT / line).replace("192.168.1.10", HEAD).split()
        return start(
            ["ip", "netns", "exec", self.names[host], *command, "--nproc", "1", *words], cwd, {"OMP_NUM_THREADS": "1"}
        )


@pytest.fixture(scope="module")
def hosts():
    need("ip")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with Hosts() as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (HEAD, r"1 of 2 nodes did not come to port 29400 within 3 s: missing 1 node; here: "),
        (PEER, rf"no answer from the head node {HEAD}, ports 29400 to 29415, within 3 s: missing {HEAD}"),
    ],
)
def test_node_that_is_alone_says_who_is_missing(hosts, tmp_path, here, message):
    (tmp_path / "worker.py").touch()
    begun = time.monotonic()
    with hosts.launch(tmp_path, here, "--wait", "3", "worker.py") as job:
        done = job.wait(20)
    assert time.monotonic() - begun < 12
    assert done.returncode == 1
    assert re.fullmatch(rf"launch.sh: {message}.*\n", done.stderr)


@contextlib.contextmanager
def on_both(hosts, folder, first, *words):
    """The jobs of the head and of its peer, one of them a little later; their workers meet at the head, by cable."""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for host in (first, PEER if first == HEAD else HEAD):
            jobs[host] = stack.enter_context(hosts.launch(folder, host, *words))
            time.sleep(1.5)
        for job in jobs.values():
            (worker,) = wait_until(lambda job=job: [p for p, line in job.processes().items() if " -u " in line], 60)
            given = psutil.Process(worker).environ()
            assert (given["GLOO_SOCKET_IFNAME"], given["MASTER_ADDR"], given["WORLD_SIZE"]) == ("cable", HEAD, "2")
        yield jobs[HEAD], jobs[PEER]


@pytest.mark.timeout(400)
def test_nodes_meet_and_a_cut_link_ends_both_and_the_run_resumes(hosts, tmp_path):
    """Whichever node is first: the head at the start, its peer when the run goes on."""
    options = [*MODEL.split(), "--workers", "0", "--max-steps", "16", "--export", "weights.pt"]
    whole = tmp_path / "undisturbed"
    whole.mkdir()
    done = run([ROOT / "launch.sh", "--nproc", "2", DDP, *options], whole, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr

    command = ["--wait", "15", DDP, *options, "--name", "cut", "--save-every", "4", "--timeout", "10"]
    with on_both(hosts, tmp_path, HEAD, *command) as jobs:
        # Rank 0, which alone writes, is on the node whose address comes first in the alphabet.
        jobs[0].wait_for("step 5/", 120)
        hosts.cable("down")
        try:
            begun = time.monotonic()
            for job in jobs:
                done = job.wait(120)
                assert done.returncode != 0
                assert re.search(r"(?i)timed? ?out|monitoredBarrier", done.stderr)
            assert time.monotonic() - begun < 120
        finally:
            hosts.cable("up")
    with on_both(hosts, tmp_path, PEER, *command) as jobs:
        ends = [job.wait(120) for job in jobs]
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    started = int(re.search(r"(?m)^steps +(\d+) to", ends[0].stdout + ends[1].stdout)[1])
    assert started >= 4
    expected = torch.load(whole / "weights.pt", weights_only=True)
    ours = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
