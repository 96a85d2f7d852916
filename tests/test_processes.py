"""The command of the README, and nothing left behind when a process dies or hangs."""

import os
import shlex
import signal
import time

from conftest import run, start, wait_until
from training import DDP, ENV, command, status, workers

LONG = shlex.split("--image-size 16 --batch-size 64 --name long --log-every 1")


def test_the_commands_of_the_issue(tmp_path):
    """As the README has them, without --standalone: on the port that two such jobs would share."""
    result = run(["torchrun", "--nproc_per_node=4", DDP, "--max-steps", "20"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "finished after step 20" in result.stdout
    assert "64 = 4 processes x 16 x 1" in result.stdout
    [path] = (tmp_path / "runs").iterdir()
    assert status(path)["status"] == "finished"
    # Rank 0 alone speaks and writes.
    assert result.stdout.count("watch it with") == 1
    assert sorted(file.suffix for file in path.iterdir() if "tfevents" not in file.name) == [".json", ".json", ".pt"]
    assert len(list(path.glob("events.out.tfevents.*"))) == 1


def test_a_killed_worker_ends_the_job(tmp_path):
    with start(command(DDP, *LONG, "--workers", "1", processes=4), tmp_path, ENV) as job:
        job.wait_for("step 2/")
        os.kill(workers(job)[2], signal.SIGKILL)
        killed = time.monotonic()
        result = job.wait(60)
    assert time.monotonic() - killed < 60
    assert result.returncode == 1
    assert "forcefully exiting" not in result.stderr, "the survivors left by themselves"
    report = result.stderr.partition("Root Cause")[2]
    assert "rank      : 2 " in report
    assert "SIGKILL" in report


def test_a_hung_process_ends_the_job(tmp_path):
    with start(
        command(DDP, *LONG, "--timeout", "5", processes=2, torchrun=["--shutdown-timeout=3"]), tmp_path, ENV
    ) as job:
        job.wait_for("step 2/")
        os.kill(workers(job)[1], signal.SIGSTOP)
        result = job.wait(60)
    assert result.returncode == 1
    assert status(tmp_path / "runs" / "long")["status"] == "failed"
    assert "rank 1" in result.stderr.lower()


def test_workers_follow_a_killed_torchrun(tmp_path):
    with start(command(DDP, *LONG, "--workers", "2", processes=2), tmp_path, ENV) as job:
        job.wait_for("step 1/")
        assert len(job.processes()) >= 7, "torchrun, two workers, and two loaders for each"
        job.signal(signal.SIGKILL)
        wait_until(lambda: not job.processes(), 5, "the workers' end")
