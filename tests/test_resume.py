"""A run that is stopped, killed and started again ends as the undisturbed one, bit for bit."""

import contextlib
import os
import shlex
import signal

import pytest
import torch
from conftest import run, start, wait_until
from strategies import assert_same_weights, close, train
from training import DDP, ENV, RECIPES, command, scalars, status, workers

# Float32, batch norm, loader workers; the first epoch ends with step 14.
OPTIONS = shlex.split("--image-size 16 --batch-size 96 --max-steps 20 --workers 1 --save-every 4 --keep 9 --name same")


def saved(path):
    """The step of the newest checkpoint."""
    return max((int(file.stem.removeprefix("step_")) for file in path.glob("step_*.pt")), default=0)


@pytest.mark.parametrize(
    "processes, log_every, plan",
    [
        # The stop comes while the epoch is evaluated.
        (2, 1, [("kill a worker", 4), ("kill all", 8), ("stop", 14)]),
        # All of these leave the first interval open, to step 18. All stop when one of them is told to.
        (4, 18, [("stop one", 4), ("kill a worker", 8), ("kill all", 16)]),
    ],
    ids=["2 processes", "4 processes"],
)
def test_a_disturbed_run_ends_like_an_undisturbed_one(tmp_path, processes, log_every, plan):
    options = *OPTIONS, "--log-every", str(log_every)
    recipe = command(DDP, *options, processes=processes, torchrun=["--max-restarts=3"])
    for folder in ("undisturbed", "disturbed"):
        (tmp_path / folder).mkdir()
    one, other = tmp_path / "undisturbed/runs/same", tmp_path / "disturbed/runs/same"
    assert run(recipe, tmp_path / "undisturbed", env=ENV).returncode == 0

    with contextlib.ExitStack() as stack:
        job = None
        for what, step in plan:
            job = job or stack.enter_context(start(recipe, tmp_path / "disturbed", ENV))
            if what == "stop":
                job.wait_for(f"step {step}/20")
            else:
                wait_until(lambda least=step: saved(other) >= least, 90, f"a checkpoint of step {step}")
            if what in ("stop", "stop one"):
                number = signal.SIGTERM if what == "stop" else signal.SIGUSR1
                os.kill(job.pid if what == "stop" else workers(job)[processes - 1], number)
                job.wait(60)
                at, job = status(other), None
                assert (at["status"], at["reason"]) == ("stopped", number.name)
                assert step <= at["step"] == saved(other) < 20, "a graceful stop loses nothing"
            elif what == "kill a worker":
                os.kill(workers(job)[processes - 1], signal.SIGKILL)
                wait_until(lambda least=step: status(other)["started_at_step"] >= least, 60, "a restart")
            else:
                job.signal(signal.SIGKILL)
                wait_until(lambda job=job: not job.processes(), 10, "the workers to follow torchrun")
                job = None
        before = saved(other)
        job = job or stack.enter_context(start(recipe, tmp_path / "disturbed", ENV))
        assert job.wait().returncode == 0
    assert status(other)["started_at_step"] == before

    for name in ("step_00000016.pt", "step_00000020.pt"):
        kept = [torch.load(path / name, weights_only=True) for path in (one, other)]
        for part in ("model", "momentum"):
            assert kept[0][part].keys() == kept[1][part].keys()
            differ = [key for key in kept[0][part] if not torch.equal(kept[0][part][key], kept[1][part][key])]
            assert not differ, f"{part}: {differ}"
        for part in ("step", "evaluated", "result", "rows"):
            assert kept[0][part] == kept[1][part]
    curves = scalars(one), scalars(other)
    assert curves[0].keys() == curves[1].keys()
    for tag in curves[0]:
        # Speed and memory are never twice the same, but stand at the same steps.
        measured = tag.startswith(("speed/", "memory/"))
        shown = [[step for step, _ in c[tag]] if measured else c[tag] for c in curves]
        assert shown[0] == shown[1], tag


def test_a_run_goes_on_under_any_strategy(tmp_path):
    chain = [("ddp", 2), ("fsdp", 3), ("pp", 2), ("mp", 1), ("dp", 1), ("pp", 4), ("ddp", 1)]
    steps, losses = [0, 1, 2, 3, 4, 5, 6, 8], []
    for k, (name, processes) in enumerate(chain):
        jobs = {"chain": f"--max-steps {steps[k + 1]}" + " --stages 2" * (name == "pp")}
        if chain[k] == chain[-1]:
            jobs["undisturbed"] = "--max-steps 8"
        results = train(tmp_path, RECIPES / f"{name}_resnet.py", processes, jobs)
        part = results["chain"]
        assert f"steps        {steps[k]} to {steps[k + 1]}, " in part.said
        losses += part.losses
    undisturbed = results["undisturbed"]
    close(undisturbed.losses, losses)
    assert_same_weights(undisturbed.weights, part.weights)
    assert undisturbed.evaluation[1] == part.evaluation[1]
