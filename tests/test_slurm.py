"""slurm/train.sbatch on a real Slurm of two nodes: start, stop, preemption, failure, clean-up."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time

import pytest
import torch
from conftest import ROOT, need, run, start, wait_until
from slurm_cluster import PROGRAMS, SBIN, BatchJob, Cluster, holders
from training import events, scalars

SCRIPT = ROOT / "slurm/train.sbatch"
DDP = ROOT / "recipes/ddp_resnet.py"
SMALL = {"data": "digits", "arch": "resnet18", "image-size": 16, "batch-size": 16, "norm": "group", "lr": 0.01}
MODEL = [str(word) for option, value in SMALL.items() for word in (f"--{option}", value)] + ["--log-every", "1"]
# One thread, as the number of threads changes the order of additions and with it the last bits.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = os.environ["PATH"]
    os.environ["PATH"] = SBIN["PATH"]
    try:
        for program in PROGRAMS:
            need(program)
        if os.geteuid() != 0:
            pytest.skip("a Slurm of several nodes on one machine needs root")
        with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    finally:
        os.environ["PATH"] = path


@pytest.fixture(autouse=True)
def nothing_queued(request):
    """A test that failed half-way must not hold the nodes that the next one needs."""
    yield
    if "cluster" in request.fixturenames and "endings" not in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        if cluster.call("squeue", "-h").stdout:
            cluster.call("scancel", "--signal=KILL", "--full", "--user=root")
            cluster.call("scancel", "--user=root")
            cluster.idle()


def weights(path):
    return torch.load(path, weights_only=True)


def assert_equal(ours, theirs, tolerance=0.0):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if tolerance:
            difference = (ours[name] - value).abs().max() / value.abs().max().clamp(min=1e-300)
            assert difference < tolerance, f"{name}: {difference}"
        else:
            assert torch.equal(ours[name], value), name


# ---- every recipe ----------------------------------------------------------------------------

FP64 = [*MODEL, "--dtype", "fp64", "--workers", "0", "--max-steps", "3"]
RECIPES = {  # nodes, GPUs per node
    "ddp_resnet.py": (2, 2),
    "fsdp_resnet.py": (2, 1),
    "pp_resnet.py": (2, 1),
    "mp_resnet.py": (1, 2),
    "dp_resnet.py": (1, 2),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of a single process; all strategies compute the same."""
    folder = tmp_path_factory.mktemp("expected")
    done = run([sys.executable, DDP, *FP64, "--export", folder / "weights.pt"], folder, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return weights(folder / "weights.pt")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if (ROOT / "recipes" / name).exists()])
def test_recipe_ends_with_the_weights_of_one_process(cluster, tmp_path, expected, recipe):
    nodes, gpus = RECIPES[recipe]
    options = [f"--nodes={nodes}", f"--gpus-per-node={gpus}"]
    command = [SCRIPT, ROOT / "recipes" / recipe, *FP64, "--export", tmp_path / "weights.pt"]
    job = cluster.sbatch(tmp_path, *options, *command, env=ONE_THREAD)
    assert job.wait() == "COMPLETED", job.log
    assert_equal(weights(tmp_path / "weights.pt"), expected, 1e-10)
    accounts = cluster.call("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job.id).stdout
    assert accounts == "COMPLETED|0:0\n"


# ---- how nodes find each other ---------------------------------------------------------------

# Says where it is and with whom, then stays for a while.
WORKER = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
names = "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID"
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, tuple(os.environ[name] for name in names))
if dist.get_rank() == 0:
    print("together:", sorted(everyone), flush=True)
while time.sleep(0.1) is None and not os.path.exists(sys.argv[1]):
    pass
dist.barrier()
if dist.get_rank() == 0:
    print("bye", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path / "worker.py"


def test_jobs_share_nodes_whose_names_do_not_resolve(cluster, tmp_path, worker):
    """Three at once, the second with more GPUs on one node than on the other. It ends before both others do."""
    with pytest.raises(OSError, match="not known|failure"):
        socket.getaddrinfo("n1", 80)
    jobs = [
        cluster.sbatch(tmp_path, "--hold", "--nodes=2", *gpus, SCRIPT, worker, f"end {k}")
        for k, gpus in enumerate((["--gpus-per-node=1"], ["--gpus-per-node=0", "--gpus=3"], ["--gpus-per-node=1"]))
    ]
    port = 20000 + 16 * (int(jobs[0].id) % 750)
    with socket.create_server(("", port)):  # something else that listens where the first job would
        for job in jobs:
            cluster.call("scontrol", "release", job.id)
        for job in jobs:
            job.wait_for("together", 120)
    assert f":{port + 1}" in jobs[0].log
    devices = {"n1": [], "n2": []}
    for job, sizes in zip(jobs, ([1, 1], [1, 2], [1, 1]), strict=True):
        together = eval(re.search(r"together: (.*)", job.log)[1])
        assert {number for *_, number in together} == {job.id}
        given = {node: (visible.split(","), int(size)) for node, visible, _, size, _ in together}
        assert sorted(size for _, size in given.values()) == sizes
        for node, (visible, size) in given.items():
            assert len(visible) == size
            devices[node] += visible
    assert all(len({*given}) == len(given) for given in devices.values()), "no GPU is given twice"
    (tmp_path / "end 1").touch()
    assert jobs[1].wait(30, idle=False) == "COMPLETED", jobs[1].log
    assert jobs[0].state == jobs[2].state == "RUNNING"
    for k in (0, 2):
        (tmp_path / f"end {k}").touch()
    for k in (0, 2):
        assert jobs[k].wait(30) == "COMPLETED", jobs[k].log


# ---- what train.sbatch makes of what a recipe left -------------------------------------------

# Stands in for launch.sh, as here only the end of a start matters: a line of PLAN for each start,
# with the exit code and, if it wrote one, its status.json.
ENDS = """#!/usr/bin/env bash
if [[ $1 == --setup-only ]]; then exit; fi
shift
line=$(sed -n "$((${SLURM_RESTART_COUNT:-0} + 1))p" <<<"$PLAN")
mkdir -p "runs/$SLURM_JOB_ID"
if [[ $SLURM_NODEID -gt 0 ]]; then exit 1; fi
echo "start ${SLURM_RESTART_COUNT:-0}"
sleep "${LATE:-0}"
if [[ ${line#* } == {* ]]; then echo "${line#* }" >"runs/$SLURM_JOB_ID/status.json"; fi
exit "${line%% *}"
"""


def status(name, step=0, started=0):
    return json.dumps({"status": name, "step": step, "started_at_step": started, "reason": "SIGTERM"})


ENDINGS = {  # the starts of the job, the state that it ends in, how often it was requeued, what its log says
    "finished": ([f"0 {status('finished', 9)}"], "COMPLETED", 0, ""),
    "finished as the signal came": ([f"1 {status('finished', 9)}"], "COMPLETED", 0, ""),
    "no run directory": (["0"], "COMPLETED", 0, ""),
    "failed": (["3"], "FAILED", 0, ""),
    "failed and said so": ([f"1 {status('failed', 4)}"], "FAILED", 0, ""),
    "died": ([f"1 {status('running', 4)}"], "FAILED", 0, ""),
    "stopped twice": (
        [f"1 {status('stopped', 4)}", f"0 {status('stopped', 9, 4)}", f"0 {status('finished', 12, 9)}"],
        "COMPLETED",
        2,
        "requeue 2, to go on from step 9",
    ),
    "no progress": ([f"0 {status('stopped', 4, 4)}"], "FAILED", 0, "stopped at step 4 without having advanced"),
    "no progress after a requeue": (
        [f"0 {status('stopped', 4)}", f"0 {status('stopped', 4, 4)}"],
        "FAILED",
        1,
        "stopped at step 4 without having advanced",
    ),
    # What an earlier start said must not speak for one that died before it said anything.
    "stale": ([f"0 {status('stopped', 4)}", "1", "0"], "FAILED", 1, "requeue 1, to go on from step 4"),
    "too often": (
        [f"0 {status('stopped', 2)}", f"0 {status('stopped', 4, 2)}", f"0 {status('stopped', 6, 4)}"],
        "FAILED",
        2,
        "stopped at step 6, and already requeued 2 times (MAX_REQUEUES): not again",
    ),
    # torchrun ends with 1 after a SIGTERM, while on another node rank 0 may still be writing. Or it may hang.
    "one node ends first": ([f"0 {status('finished', 9)}"], "COMPLETED", 0, ""),
    "one node ends, the other hangs": (["0"], "FAILED", 0, ""),
}
LATE = {"one node ends first": "3", "one node ends, the other hangs": "600"}  # seconds, on the first of two nodes


@pytest.fixture(scope="module")
def endings(cluster, tmp_path_factory):
    """All of them at once: a requeued job waits for seconds in which nothing happens."""
    folder = tmp_path_factory.mktemp("endings")
    (folder / "launch.sh").write_text(ENDS)
    (folder / "launch.sh").chmod(0o755)
    options = ["--gpus-per-node=0", "--cpus-per-task=1"]
    jobs = {}
    for name, (plan, *_) in ENDINGS.items():
        env = {"CHECKOUT": str(folder), "PLAN": "\n".join(plan), "MAX_REQUEUES": "2", "LATE": LATE.get(name, "0")}
        nodes = f"--nodes={1 + (name in LATE)}"
        jobs[name] = cluster.sbatch(folder, *options, nodes, SCRIPT, "recipe.py", env=env)
    return jobs


@pytest.mark.parametrize("name", ENDINGS)
def test_requeued_by_the_marker_or_ended(endings, name):
    _, state, restarts, message = ENDINGS[name]
    job = endings[name]
    assert job.wait(120, idle=False) == state, job.log
    assert int(job.show()["Restarts"]) == restarts
    assert message in job.log
    assert [f"start {k}\n" in job.log for k in range(restarts + 2)] == [True] * (restarts + 1) + [False]


def test_array_requeues_only_its_own_task(cluster, tmp_path):
    (tmp_path / "launch.sh").write_text(
        ENDS.replace("line=$(", "if [[ $SLURM_ARRAY_TASK_ID == 1 ]]; then PLAN=$OTHER; fi\nline=$(")
    )
    (tmp_path / "launch.sh").chmod(0o755)
    env = {
        "CHECKOUT": str(tmp_path),
        "PLAN": f"0 {status('finished', 9)}",
        "OTHER": f"0 {status('stopped', 4)}\n0 {status('finished', 9, 4)}",
    }
    options = ["--gpus-per-node=0", "--cpus-per-task=1", "--array=0-1"]
    array = cluster.sbatch(tmp_path, *options, SCRIPT, "recipe.py", env=env)
    named = cluster.sbatch(tmp_path, *options, SCRIPT, "recipe.py", "--name", "mine", env=env)

    def ended():
        lines = cluster.call("scontrol", "--oneliner", "show", "job", array.id).stdout.splitlines()
        tasks = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
        return len(tasks) == 2 and all(task["JobState"] == "COMPLETED" for task in tasks) and tasks

    tasks = wait_until(ended, 60, "both tasks to complete")
    assert {task["ArrayTaskId"]: task["Restarts"] for task in tasks} == {"0": "0", "1": "1"}
    named.wait_for("--name mine would be the run of all tasks of this array", 30)


def test_submitted_from_elsewhere_says_what_is_missing(cluster, tmp_path):
    for args, message in (([], "which recipe?"), (["recipe.py"], f"no launch.sh in {tmp_path}")):
        job = cluster.sbatch(tmp_path, "--gpus-per-node=0", SCRIPT, *args, env={"CHECKOUT": ""})
        assert job.wait(30) == "FAILED"
        assert message in job.log


# ---- preemption, requeue, time limit ---------------------------------------------------------

STEPS = 32
RUN = [*MODEL, "--workers", "1", "--max-steps", str(STEPS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [ROOT / "launch.sh", "--nproc", "2", DDP, *RUN, "--export", folder / "weights.pt"]
    done = run(command, folder, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return weights(folder / "weights.pt")


def assert_undisturbed(log, folder, name, undisturbed):
    """As if nothing had happened: the same bits, every step once, in one stream and one log."""
    path = folder / "runs" / name
    assert_equal(weights(folder / "weights.pt"), undisturbed)
    assert [step for step, _ in scalars(path)["train/loss"]] == list(range(1, STEPS + 1))
    stops = [int(step) for step in re.findall(r"stopped by \w+ after step (\d+)", log)]
    assert starts(log) == [0, *stops]  # no step lost
    assert json.loads((path / "status.json").read_text())["status"] == "finished"


def workers(job):
    return [pid for pid, line in job.processes().items() if " -u " in line and "_resnet.py" in line]


def starts(log):
    """The steps at which the run began and went on."""
    return [int(step) for step in re.findall(r"(?m)^steps +(\d+) to", log)]


def freeze(job, restarts):
    """Hold the run soon after its start, so that what Slurm does next finds it there. Slurm's SIGTERM wakes it."""
    wait_until(lambda: len(starts(job.log)) > restarts, 120, f"start {restarts} of the run")
    job.wait_for(f"step {starts(job.log)[restarts] + 2}/{STEPS}", 60)
    for pid in workers(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def preempt(cluster, folder, job):
    high = cluster.sbatch(folder, "--partition=high", "--nodes=2", "--exclusive", "--wrap", "true")
    wait_until(lambda: high.state == "COMPLETED", 120, "the job that preempts")


def run_out_of_time(cluster, job, requeue):
    """Let Slurm's warning of the time limit come to a frozen job, then let it go on, and once more without limit."""
    cluster.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=3")  # --signal is 3 minutes before it
    wait_until(lambda: "time limit" in job.log, 90, "Slurm to announce the time limit")
    for pid in workers(job):
        os.kill(pid, signal.SIGCONT)
    job.wait_for(f"requeue {requeue}, to go on from step", 60)
    wait_until(lambda: job.state == "RUNNING", 30, "the job to start again")
    cluster.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=30")


@pytest.mark.timeout(600)
def test_preempted_twice_requeued_by_hand_out_of_time_and_cancelled(cluster, tmp_path, undisturbed):
    """What a job leaves that was cancelled goes on elsewhere."""
    command = [SCRIPT, DDP, *RUN, "--name", "mine"]
    job = cluster.sbatch(tmp_path, "--nodes=2", *command, env=ONE_THREAD)
    for restarts in (0, 1):
        freeze(job, restarts)
        preempt(cluster, tmp_path, job)
    freeze(job, 2)
    cluster.call("scontrol", "requeue", job.id)
    freeze(job, 3)
    run_out_of_time(cluster, job, requeue=4)
    freeze(job, 4)
    cluster.call("scancel", job.id)
    assert job.wait(40) == "CANCELLED", job.log
    assert job.show()["Restarts"] == "4"
    command = [ROOT / "launch.sh", "--nproc", "2", *command[1:], "--export", tmp_path / "weights.pt"]
    done = run(command, tmp_path, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert_undisturbed(job.log + done.stdout, tmp_path, "mine", undisturbed)


def test_preempted_before_it_could_train(cluster, tmp_path):
    """Slurm calls a preempted job that ends by itself a failure; it is requeued all the same."""
    (tmp_path / "launch.sh").write_text(
        "#!/usr/bin/env bash\nif [[ $1 == --setup-only || ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then exit; fi\n"
        "echo waiting\nsleep 60\n"
    )
    (tmp_path / "launch.sh").chmod(0o755)
    job = cluster.sbatch(tmp_path, "--nodes=2", SCRIPT, "recipe.py", env={"CHECKOUT": str(tmp_path)})
    job.wait_for("waiting")
    preempt(cluster, tmp_path, job)
    assert job.wait(60) == "COMPLETED", job.log
    assert job.show()["Restarts"] == "1"


# ---- cancelled, killed, failed ---------------------------------------------------------------


def test_killed_process_ends_the_job_and_is_named(cluster, tmp_path):
    """In one job it is a rank, in another torchrun."""
    command = [SCRIPT, DDP, *RUN, "--workers", "0", "--max-steps", "500"]
    jobs = {name: cluster.sbatch(tmp_path, "--nodes=2", *command, env=ONE_THREAD) for name in (" -u ", "bin/torchrun")}
    for name, job in jobs.items():
        job.wait_for("step 4/", 120)
        (victim,) = [pid for pid in holders(b"SLURMD_NODENAME=n2") if name in job.processes().get(pid, "")]
        os.kill(victim, signal.SIGKILL)
        said = rf"exitcode\s*: -9 \(pid: {victim}\)" if name == " -u " else "n2: task 1: Killed"
        jobs[name] = job, said
    begun = time.monotonic()
    for job, said in jobs.values():
        assert job.wait(120, idle=False) == "FAILED", job.log
        assert time.monotonic() - begun < 90  # the minute that srun waits for other nodes, and KillWait
        assert job.show()["Restarts"] == "0"
        assert re.search(said, job.log), job.log
    cluster.idle()


@pytest.mark.timeout(600)
def test_lost_node_requeues_the_job_and_it_resumes(cluster, tmp_path, undisturbed):
    command = [SCRIPT, DDP, *RUN, "--save-every", "4", "--export", tmp_path / "weights.pt"]
    job = cluster.sbatch(tmp_path, "--nodes=2", *command, env=ONE_THREAD)
    wait_until(lambda: any((tmp_path / "runs" / job.id).glob("step_*.pt")), 120, "a checkpoint")
    cluster.kill_node("n2")
    try:
        wait_until(lambda: job.state in ("PENDING", "FAILED", "NODE_FAIL"), 90, "Slurm to give the job up")
        assert job.show()["Restarts"] == "1", job.log
        assert not job.processes()
    finally:
        cluster.revive_node("n2")
    assert job.wait(120) == "COMPLETED", job.log
    assert re.search(r"(?i)node failure|n2.*(unresponsive|not responding|lost|down)", job.log), job.log
    assert_equal(weights(tmp_path / "weights.pt"), undisturbed)
    assert starts(job.log)[1] >= 4


def test_failure_at_once_is_failed_with_one_clear_line(cluster, tmp_path):
    wrong = {"options: --learning-rate": ["--learning-rate", "1"], "/no/such/folder": ["--data", "/no/such/folder"]}
    jobs = {line: cluster.sbatch(tmp_path, SCRIPT, DDP, *options) for line, options in wrong.items()}
    for line, job in jobs.items():
        assert job.wait(120, idle=False) == "FAILED", job.log
        assert job.show()["Restarts"] == "0"
        assert len(re.findall(r"(?m)^ddp_resnet.py: .*", job.log)) == 1, job.log
        said, _, after = job.log.partition("ddp_resnet.py: ")
        assert line in after.splitlines()[0]
        # What follows is torchrun's and Slurm's; nothing of the recipe, and no traceback through it.
        assert "recipes/ddp_resnet.py" not in "".join(re.findall(r'(?m)^ *File "(.*)", line', job.log))
        assert not re.search(r"(?m)^(steps|step|run) ", said + after)


# ---- submit.py -------------------------------------------------------------------------------

SUBMIT = [sys.executable, str(ROOT / "slurm/submit.py")]
ON_SLURM = ["--cpus-per-task", "2", "--time", "10"]
# Says what it was given, and ends with the exit code that --code asks for.
RECIPE = """
import os, sys, time
print("recipe", sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["SLURM_NNODES"], flush=True)
sys.exit(sum(int(word[7:]) for word in sys.argv if word.startswith("--code=")))
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    return "recipe.py"


class Submitted(BatchJob):
    """The job of submit.py, by what it printed."""

    def __init__(self, cluster, submit, cwd):
        wait_until(lambda: "scancel" in submit.stdout or submit.process.poll() is not None, 60, "a job id")
        job_id, name, log = re.search(r"job (\w+): runs/(\S+), log (\S+)", submit.stdout + submit.stderr).groups()
        super().__init__(cluster, job_id, cwd, submit.mark)
        self.name, self.path = name, cwd / log

    @property
    def log(self):
        return self.path.read_text(errors="replace") if self.path.exists() else ""


@pytest.mark.timeout(600)
def test_preempted_requeued_and_out_of_time_through_submitit(cluster, tmp_path, undisturbed):
    command = [*SUBMIT, *ON_SLURM, "--nodes", "2", "--follow", DDP, *RUN, "--export", tmp_path / "weights.pt"]
    with start(command, tmp_path, {**cluster.env, **ONE_THREAD}) as submit:
        job = Submitted(cluster, submit, tmp_path)
        freeze(job, 0)
        preempt(cluster, tmp_path, job)
        freeze(job, 1)
        cluster.call("scontrol", "requeue", job.id)
        freeze(job, 2)
        run_out_of_time(cluster, job, requeue=3)
        done = submit.wait()
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"job {job.id}: COMPLETED\n")
    assert job.log in done.stdout
    assert job.show()["Restarts"] == "3"
    assert_undisturbed(job.log, tmp_path, job.id, undisturbed)


def test_local_job_that_fails(tmp_path):
    """One that succeeds is in the guide."""
    (tmp_path / "fails.py").write_text("import sys; sys.exit('out of luck')")
    done = run([*SUBMIT, "--cluster", "local", "--follow", "fails.py", "--name", "first"], tmp_path)
    assert done.returncode == 1
    assert re.search(r"job \d+: runs/first, log runs/submitit/\d+_0_log.out", done.stdout)
    assert "out of luck" in done.stdout


def test_what_is_wrong_is_said_before_anything_is_queued(cluster, tmp_path, recipe):
    last = cluster.sbatch(tmp_path, "--wrap", "true")
    for words, message in (
        (["--sweep", "lr=0.1,high", DDP], "high"),
        (["--sweep", "lr", DDP], "--sweep takes OPTION=VALUE,VALUE"),
        ([DDP.with_name("no.py")], "no such recipe"),
        ([], "which recipe?"),
        (["--partition", "nowhere", recipe], "invalid partition specified: nowhere"),
    ):
        done = run([*SUBMIT, *words], tmp_path, env=cluster.env)
        assert done.returncode in (1, 2), (words, done.stdout)
        assert message in done.stderr, words
        assert "Traceback" not in done.stderr
    assert cluster.sbatch(tmp_path, "--wrap", "true").id == str(int(last.id) + 1)


def test_dry_run_shows_the_job_and_submits_nothing(tmp_path):
    options = ["--dry-run", "--nodes", "4", "--gpus-per-node", "h200:8", "--partition", "long", "--mem", "0"]
    for more in (["--account", "us"], ["--qos", "high"], ["--constraint", "ib"], ["--time", "2:00:00"]):
        options += more
    (tmp_path / "recipe.py").write_text("")
    done = run([*SUBMIT, *options, "--sweep", "lr=0.1,0.2", "seed=0,1", "recipe.py", "--epochs", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "nodes=4", "gpus-per-node=h200:8", "ntasks-per-node=1", "partition=long", "mem=0", "account=us", "qos=high",
        "constraint=ib", "time=2:00:00", "signal=B:USR1@180", "requeue", "open-mode=append", "array=0-3%4",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in done.stdout
    assert "recipe.py --epochs 2 --lr=0.2 --seed=1 --name=sweep-" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_sweep_is_an_array_of_runs_whose_logs_are_told_apart(cluster, tmp_path, recipe):
    """What recipes make of it is in the guide."""
    options = [*ON_SLURM, "--follow", "--sweep", "lr=0.1,0.2"]
    done = run([*SUBMIT, *options, recipe, "--name", "tune"], tmp_path, env=cluster.env)
    assert done.returncode == 0, done.stdout
    for lr in ("0.1", "0.2"):
        assert f"[lr={lr}] recipe ['--name', 'tune', '--lr={lr}', '--name=tune/lr={lr}'] " in done.stdout


def test_cancelled_while_pending(cluster, tmp_path, recipe):
    cluster.call("scontrol", "update", "PartitionName=low", "State=DOWN")
    try:
        with start([*SUBMIT, *ON_SLURM, "--follow", recipe], tmp_path, cluster.env) as submit:
            job = Submitted(cluster, submit, tmp_path)
            assert job.state == "PENDING"
            cluster.call("scancel", job.id)
            done = submit.wait(30)
    finally:
        cluster.call("scontrol", "update", "PartitionName=low", "State=UP")
    assert done.returncode == 1
    assert done.stdout.endswith(f"job {job.id}: CANCELLED\n")


def test_submitted_from_inside_an_allocation(cluster, tmp_path, recipe):
    within = ["salloc", "--quiet", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--ntasks-per-node=1"]
    # srun refuses a job that has memory per core from the outer one and per node of its own.
    within += ["--mem-per-cpu=20", "srun", "--nodes=1", "--ntasks=1"]
    within += [*SUBMIT, *ON_SLURM, "--mem=50", "--gpus-per-node", "0", "--follow", recipe]
    done = run(within, tmp_path, env=cluster.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipe [] None 1\n" in done.stdout  # neither the devices nor the nodes of the outer job


@pytest.mark.parametrize("accounting", [True, False])
def test_follow_ends_as_the_job_does(request, tmp_path, tmp_path_factory, recipe, accounting):
    with contextlib.ExitStack() as stack:
        if accounting:
            cluster = request.getfixturevalue("cluster")
        else:
            cluster = stack.enter_context(Cluster(tmp_path_factory.mktemp("plain"), accounting=False))
        for code in (0, 1):
            done = run([*SUBMIT, *ON_SLURM, "--follow", recipe, f"--code={code}"], tmp_path, env=cluster.env)
            assert done.returncode == code, done.stdout + done.stderr
            assert f"recipe ['--code={code}'] 0 1\n" in done.stdout
            assert done.stdout.endswith(f": {'FAILED' if code else 'COMPLETED'}\n")


def test_follow_falls_back_on_the_run_directory(cluster, tmp_path):
    """Some minutes after its end a Slurm without accounting knows nothing of a job."""
    code = """
import runpy, sys, types
run = runpy.run_path(sys.argv[1])["Run"]
job = types.SimpleNamespace(job_id="99999", paths=types.SimpleNamespace(stdout=None))
print([run(job, name).state() for name in ("good", "bad", "none")])
"""
    for name, word in (("good", "finished"), ("bad", "failed")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text(status(word))
    done = run([sys.executable, "-c", code, SUBMIT[1]], tmp_path, env=cluster.env)
    assert done.stdout == "[('COMPLETED', 0), ('FAILED', 1), ('FAILED', 1)]\n", done.stderr


# ---- the README's cluster guide --------------------------------------------------------------

SSH = """#!/usr/bin/env bash
# Stands in for ssh: the login node is this machine, and the port is the same at both ends.
[[ $1 == -L && $2 == 6006:localhost:6006 && $3 == login.cluster ]] && cd .. && exec bash -c "$4"
"""


def guide():
    """The commands of the cluster guide, in their order."""
    section = (ROOT / "README.md").read_text().partition("\n## Cluster guide\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```bash\n(.*?)```", section, re.S) for line in block.splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The checkout, under the name that the guide has for it, with runs and logs of its own."""
    folder = tmp_path_factory.mktemp("home") / "multi-gpu-resnet"
    folder.mkdir()
    for name in ("launch.sh", "slurm", "recipes", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    (folder.parent / "bin").mkdir()
    (folder.parent / "bin/ssh").write_text(SSH)
    (folder.parent / "bin/ssh").chmod(0o755)
    return folder


@pytest.mark.timeout(600)
def test_every_command_of_the_guide(cluster, checkout):
    env = {**cluster.env, **ONE_THREAD, "PATH": f"{checkout.parent}/bin:{cluster.env['PATH']}"}
    ran, job_id = [], None

    def bash(command, timeout=180):
        ran.append(command)
        done = cluster.call("bash", "-c", command, cwd=checkout, env=env, timeout=timeout)
        return done.stdout + done.stderr

    def submit(command):
        (number,) = re.findall(r"Submitted batch job (\d+)", bash(f"{command} --image-size 16"))
        return BatchJob(cluster, number, checkout, "")

    for command in guide():
        words = command.replace("JOBID", job_id or "JOBID")
        if command.startswith("sbatch slurm/") and job_id is None:
            job = submit(words)
            job_id = job.id
            wait_until((checkout / f"runs/{job_id}/status.json").exists, 120, "the first job to train")
            cluster.call("scancel", "--signal=STOP", job_id)  # it need not train while others do
        elif command.startswith("sbatch"):
            other = submit(f"{words} --max-steps 1")
            assert other.wait(180, idle=False) == "COMPLETED"
        elif command.startswith("ssh"):
            with start(["bash", "-c", words], checkout, env) as tunnel:
                ran.append(words)
                wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", 6006)) == 0, 120, "TensorBoard")
                tunnel.kill()
        elif command.startswith("scancel"):
            bash(words)
            assert job.wait(40, idle=False) == "CANCELLED"
        elif "submit.py" in command:
            output = bash(f"{words} --image-size 16 --max-steps 1")
            for number in re.findall(r"to cancel: scancel (\d+)", output):
                wait_until(lambda n=number: not cluster.call("squeue", "-h", "-j", n, check=False).stdout, 180, number)
            if "--follow" in command:
                assert "finished after step 1" in output
            if "--cluster local" in command:
                assert re.search(r"job \d+: runs/\S+, log runs/submitit/\d+_0_log.out", output)
        elif "--head" in command:
            assert "--head 192.168.1.10 recipes" in command  # two hosts: test_namespaces.py
            ran.append(words)
        else:
            output = bash(words)
            assert "JOBID" not in words
            if "pgrep" in command:
                assert re.search(r"n[12]\n\d+\n", output)
            if "status.json" in command:
                assert '"running"' in output
    assert len(ran) == len(guide()) > 12
    for lr in ("0.05", "0.1"):
        (path,) = (checkout / "runs").glob(f"sweep-*/lr={lr}")
        assert json.loads((path / "config.json").read_text())["lr"] == float(lr)
        assert events(path).SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == "hparams"
    runs = [json.loads(path.read_text())["status"] for path in (checkout / "runs").glob("**/status.json")]
    assert runs.count("finished") == len(runs) >= 5
