"""launch.sh: set-up, devices, the torchrun command. Slurm and several hosts are tested elsewhere."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, run, start, wait_until

# What a stand-in for torchrun reports: how it was called, in what environment.
TORCHRUN = """
import os, signal, sys

def main():
    print(sys.argv[1:])
    print("OMP", os.environ["OMP_NUM_THREADS"], "GLOO", os.environ.get("GLOO_SOCKET_IFNAME"))
    print("USR1 ignored" if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN else "USR1 kills")
    print("python", sys.prefix)

if __name__ == "__main__":
    main()
"""


def wheel(folder, name, version):
    """A small wheel that pip and uv install as NAME, so that set-up is tested without 5 GB."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "torch":
        files["torch/distributed/run.py"] = TORCHRUN
        files[f"{info}/entry_points.txt"] = "[console_scripts]\ntorchrun = torch.distributed.run:main\n"
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


class Checkout:
    """A copy of launch.sh with a tiny requirements.txt, as a stranger has it after git clone."""

    def __init__(self, folder):
        self.root = folder / "check out"
        self.cwd = folder / "some where"
        self.wheels = folder / "wheels"
        self.bin = folder / "bin"  # programs that this machine has beside the usual ones
        for path in (self.root, self.cwd, self.wheels, self.bin):
            path.mkdir()
        (self.root / "slurm").mkdir()
        for name in ("launch.sh", "slurm/rollcall.py"):
            shutil.copy2(ROOT / name, self.root / name)
        (self.root / "requirements.txt").write_text("torch>=2.14\n")
        self.recipe = self.cwd / "my recipe.py"
        self.recipe.write_text('"""A recipe."""\n')
        wheel(self.wheels, "torch", "2.14")
        (self.bin / "uv").symlink_to(Path(sys.executable).with_name("uv"))  # quicker than pip
        self.env = {
            "PATH": f"{self.bin}:{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "UV_OFFLINE": "1",
            "UV_LINK_MODE": "copy",
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(self.wheels),
            "UV_CACHE_DIR": str(folder / "uv cache"),
        }

    def command(self, *args):
        return [self.root / "launch.sh", *args]

    def launch(self, *args, env=None, timeout=60):
        return run(self.command(*args), self.cwd, timeout, {**self.env, **(env or {})})

    def slow_uv(self):
        """Set-up then takes long enough for something to happen in it."""
        uv = self.bin / "uv"
        target = uv.readlink()
        uv.unlink()
        uv.write_text(f'#!/bin/sh\nsleep 1\nexec {shlex.quote(str(target))} "$@"\n')
        uv.chmod(0o755)


@pytest.fixture
def fresh(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A checkout that is set up; tests of it change nothing in it."""
    checkout = Checkout(tmp_path_factory.mktemp("launch"))
    done = checkout.launch("--setup-only")
    assert done.returncode == 0, done.stderr
    return checkout


# ---- set-up --------------------------------------------------------------------------------


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_first_run_sets_up_and_the_second_starts_at_once(fresh, installer):
    if installer == "pip":
        (fresh.bin / "uv").unlink()
    begun = time.monotonic()
    first = fresh.launch(fresh.recipe, "--lr", "0.1 or so")
    installed = time.monotonic()
    assert first.returncode == 0, first.stderr
    assert "installing requirements.txt" in first.stderr
    assert f"{str(fresh.recipe)!r}, '--lr', '0.1 or so']" in first.stdout
    assert f"python {fresh.root}/.venv" in first.stdout
    second = fresh.launch(fresh.recipe)
    assert time.monotonic() - installed < installed - begun
    assert second.returncode == 0, second.stderr
    assert "installing" not in second.stderr
    assert not list(fresh.cwd.glob(".venv*"))


def test_changed_requirements_are_installed(fresh):
    assert fresh.launch("--setup-only").returncode == 0
    wheel(fresh.wheels, "torch", "2.15")
    (fresh.root / "requirements.txt").write_text("torch>=2.15\n")
    again = fresh.launch("--setup-only")
    assert again.returncode == 0
    assert "installing" in again.stderr
    assert list(fresh.root.glob(".venv/lib/*/site-packages/torch-2.15.dist-info"))
    assert "installing" not in fresh.launch("--setup-only").stderr


def test_failed_setup_is_an_error_and_is_begun_anew(fresh):
    hidden = fresh.wheels.rename(fresh.wheels.with_name("hidden"))
    failed = fresh.launch(fresh.recipe)
    assert failed.returncode == 1
    assert "set-up failed" in failed.stderr
    assert "USR1" not in failed.stdout  # nothing was started
    hidden.rename(fresh.wheels)
    assert fresh.launch(fresh.recipe).returncode == 0


def test_killed_setup_is_begun_anew(fresh):
    fresh.slow_uv()
    with start(fresh.command("--setup-only"), fresh.cwd, fresh.env) as job:
        wait_until(lambda: (fresh.root / ".venv/bin/python").exists(), 30, "a half-made .venv")
        job.kill()
    (fresh.root / ".venv/half-made").touch()
    done = fresh.launch(fresh.recipe)
    assert done.returncode == 0, done.stderr
    assert not (fresh.root / ".venv/half-made").exists()


def test_two_first_runs_at_once_install_once(fresh):
    fresh.slow_uv()
    with (
        start(fresh.command("--setup-only"), fresh.cwd, fresh.env) as one,
        start(fresh.command("--setup-only"), fresh.cwd, fresh.env) as two,
    ):
        both = [one.wait(60), two.wait(60)]
    assert [done.returncode for done in both] == [0, 0]
    assert sum("installing" in done.stderr for done in both) == 1


def test_venv_made_by_hand_is_kept(fresh):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh.root / ".venv"], check=True)
    (fresh.root / ".venv/mine").touch()
    assert fresh.launch("--setup-only").returncode == 0
    assert (fresh.root / ".venv/mine").exists()


@pytest.mark.parametrize("stamp", ["stamped", "made by hand"])
def test_read_only_checkout_with_a_venv(fresh, stamp):
    assert fresh.launch("--setup-only").returncode == 0
    if stamp == "made by hand":
        (fresh.root / ".venv/requirements.txt").unlink()
    if os.geteuid() == 0:  # root may write anywhere, except on a read-only mount
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, fresh.root, *fresh.command(fresh.recipe)]
    else:
        fresh.root.chmod(0o555)
        command = fresh.command(fresh.recipe)
    done = run(command, fresh.cwd, env=fresh.env)
    fresh.root.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "installing" not in done.stderr
    assert f"python {fresh.root}/.venv" in done.stdout


def test_active_environment_with_torch_is_used_as_it_is(fresh, ready, tmp_path):
    active = tmp_path / "conda or venv"
    shutil.copytree(ready.root / ".venv", active, symlinks=True)
    (active / "bin/torchrun").unlink()  # a copy's would run the original; without it, python -m does
    (fresh.root / "requirements.txt").write_text("torch>=2.15\nelsewhere\n")
    done = fresh.launch(fresh.recipe, env={"PATH": f"{active}/bin:{fresh.env['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert f"python {active}" in done.stdout
    assert "torch 2.14 (>= 2.15 is asked for), no elsewhere" in done.stderr
    assert not (fresh.root / ".venv").exists()


def test_active_environment_without_torch_is_not_used(fresh, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "active"], check=True)
    # pip comes from the interpreter's own ensurepip, in the .venv that is made.
    done = fresh.launch(fresh.recipe, env={"PATH": f"{tmp_path}/active/bin:{fresh.env['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert f"python {fresh.root}/.venv" in done.stdout


# ---- what is refused, before anything is set up --------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "which recipe?"),
        (["no such recipe.py"], "no such recipe: no such recipe.py"),
        (["."], "no such recipe: ."),
        (["--nprocs", "2", "my recipe.py"], "unknown option --nprocs"),
        (["--nproc", "0", "my recipe.py"], "--nproc takes a positive number, not '0'"),
        (["--nproc=two", "my recipe.py"], "--nproc takes a positive number, not 'two'"),
        (["--nproc"], "--nproc needs a value"),
        (["--nnodes", "2", "my recipe.py"], "--nnodes 2 needs --head"),
        (["--head", "somewhere", "my recipe.py"], "--head needs --nnodes"),
    ],
)
def test_refused(fresh, args, message):
    done = fresh.launch(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (fresh.root / ".venv").exists()


def test_help_explains(fresh):
    done = fresh.launch("-h")
    assert done.returncode == 0
    for option in ("--nproc", "--nnodes", "--head HOST[:PORT]", "--setup-only", "--wait"):
        assert option in done.stdout
    assert not (fresh.root / ".venv").exists()


# ---- devices -------------------------------------------------------------------------------

GPUS = "#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: NVIDIA H200 (UUID: GPU-$i)\"; echo '  MIG 1g.18gb'; done\n"


@pytest.mark.parametrize(
    ("gpus", "visible", "processes"),
    [
        (4, None, 4),
        (4, "1,3", 2),
        (4, "GPU-1", 1),
        (4, "0,1,2,3,4,5", 4),
        (4, "", "cpu"),
        (4, "-1", "cpu"),
        (0, None, "cpu"),
        (0, "0,1,2", 3),  # a Slurm with GPUs that nvidia-smi does not know
    ],
)
def test_one_process_per_visible_gpu(ready, tmp_path, gpus, visible, processes):
    if gpus:
        (tmp_path / "nvidia-smi").write_text(GPUS)
        (tmp_path / "nvidia-smi").chmod(0o755)
    elif shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    env = {"PATH": f"{tmp_path}:{ready.env['PATH']}"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    cores = len(os.sched_getaffinity(0))
    if processes == "cpu":
        processes = min(2, cores)
    done = ready.launch(ready.recipe, env=env)
    assert f"'--nproc-per-node={processes}'" in done.stdout
    assert f"OMP {max(1, cores // processes)} GLOO lo" in done.stdout


def test_one_core_one_process_and_threads_as_the_user_set_them(ready):
    done = run(["taskset", "-c", "0", *ready.command(ready.recipe)], ready.cwd, env=ready.env)
    assert "'--nproc-per-node=1'" in done.stdout
    done = ready.launch("--nproc", "3", ready.recipe, env={"OMP_NUM_THREADS": "7"})
    assert "'--nproc-per-node=3'" in done.stdout
    assert "OMP 7" in done.stdout


def test_recipe_that_drives_all_devices_gets_one_process(ready, tmp_path):
    recipe = tmp_path / "renamed.py"
    recipe.write_text('"""One process,\nmany devices."""\n\n# Processes: one drives all devices.\n')
    assert "'--nproc-per-node=1'" in ready.launch(recipe).stdout
    for options in (["--nproc", "2"], ["--nnodes", "2", "--head", "localhost"]):
        done = ready.launch(*options, recipe)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "drives" in done.stderr


def test_command_is_printed_and_can_be_run_again(ready):
    done = ready.launch(ready.recipe, "--name", "a b")
    (command,) = [line for line in done.stderr.splitlines() if "torchrun" in line]
    again = run(["bash", "-c", command.removeprefix("launch.sh: ")], ready.cwd, env=ready.env)
    assert again.stdout.splitlines()[:2] == done.stdout.splitlines()[:2]
    assert "USR1 ignored" in done.stdout


# ---- torchrun itself -----------------------------------------------------------------------

WORKER = """
import os, signal, sys, time
import torch.distributed as dist
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
dist.init_process_group("gloo")
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, sys.argv[1])
if dist.get_rank() == 0:
    print("together: " + " ".join(everyone) + "\\n", end="", flush=True)
if sys.argv[1] == "fail":
    sys.exit(5)
time.sleep(float(sys.argv[2]))
print("slept\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_two_jobs_on_one_machine_end_each_in_its_own_way(tmp_path):
    """They do not meet, a failed worker is an error, and USR1 reaches workers without killing their agent."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = [ROOT / "launch.sh", "--nproc", "2", "worker.py"]
    with start([*command, "fail", "0"], tmp_path) as one, start([*command, "stay", "600"], tmp_path) as two:
        done = one.wait(90)
        assert done.returncode == 1
        assert "together: fail fail\n" in done.stdout
        two.wait_for("together: stay stay\n", 60)
        workers = [pid for pid, line in two.processes().items() if " -u " in line]
        two.signal(signal.SIGUSR1)
        time.sleep(1)
        assert two.process.poll() is None
        for pid in workers:
            os.kill(pid, signal.SIGUSR1)
        done = two.wait(30)
    assert done.returncode == 0, done.stderr
    assert "slept" not in done.stdout


# ---- the roll call of several nodes --------------------------------------------------------


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1] % 10000 + 20000


def node(tmp_path, port, index, names=("n1", "n2"), wait=20, job="7.0.0", nodes=True):
    named = ["--nodes", ",".join(names)] if nodes else []
    at = ["--job", job, "--head", "127.0.0.1", "--port", port, "--wait", wait, "--nnodes", len(names)]
    command = [sys.executable, ROOT / "slurm/rollcall.py", *at, "--node", names[index], "--index", index, *named]
    return start(command, tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_find_each_other_in_any_order(tmp_path, port, order):
    names = ("n1", "n2", "n3")
    jobs = {}
    for index in order:
        jobs[index] = node(tmp_path, port, index, names)
        time.sleep(0.5)
    for index, job in jobs.items():
        with job:
            done = job.wait(20)
        assert done.returncode == 0, done.stderr
        is_host = int(index == 0)
        assert done.stdout == f"{is_host} 127.0.0.1:{port} 7.0.0 127.0.0.1 lo\n"


def test_occupied_ports_are_passed_over(tmp_path, port):
    with (
        socket.create_server(("127.0.0.1", port)),  # accepts, and says nothing
        socket.create_server(("", port + 1)),
        node(tmp_path, port, 0) as head,
        node(tmp_path, port, 1, job="8.0.0") as peer_of_another,  # and so first at this head, which isn't its own
    ):
        time.sleep(1)
        with node(tmp_path, port, 0, job="8.0.0") as head_of_another, node(tmp_path, port, 1) as peer:
            found = {job: job.wait(40).stdout.split() for job in (head, peer, head_of_another, peer_of_another)}
    assert {found[head][1], found[head_of_another][1]} == {f"127.0.0.1:{port + 2}", f"127.0.0.1:{port + 3}"}
    assert found[peer][1:3] == found[head][1:3]
    assert found[peer_of_another][1:3] == found[head_of_another][1:3]


def test_strangers_at_the_port_do_no_harm(tmp_path, port):
    with node(tmp_path, port, 0) as head:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 10)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\xff\xfe")
        with socket.create_connection(("127.0.0.1", port)), node(tmp_path, port, 1) as peer:
            assert peer.wait(20).returncode == 0
            assert head.wait(20).returncode == 0


@pytest.mark.parametrize(
    ("here", "nodes", "message"),
    [
        ([0, 1], True, "1 of 3 nodes did not come to port {port} within 2 s: missing n3; here: n1, n2"),
        ([0], True, "2 of 3 nodes did not come to port {port} within 2 s: missing n2, n3; here: n1"),
        ([0, 1], False, "missing 1 node; here: n1, n2 (127.0.0.1)"),
        ([1], True, "no answer from the head node 127.0.0.1, ports {port} to {last}, within 2 s: missing n1"),
    ],
)
def test_missing_nodes_are_named_by_all_after_a_bounded_wait(tmp_path, port, here, nodes, message):
    jobs = [node(tmp_path, port, index, ("n1", "n2", "n3"), wait=2, nodes=nodes) for index in here]
    for job in jobs:
        with job:
            done = job.wait(8)
        assert done.returncode == 1
        assert message.format(port=port, last=port + 15) in done.stderr
        assert done.stderr.count("\n") == 1
