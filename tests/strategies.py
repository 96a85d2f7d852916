"""What the tests of the strategies share: the same numbers as ddp, and the same end after a restart.

Run as a program, by torchrun or not, this file trains a recipe once per job in one set of processes, as most of a
short run's time goes by while Python imports torch.
"""

import json
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import run, start, wait_until
from training import ENV, command, load, newest, scalars, status, values

# Double precision and a norm that knows no batch leave nothing but rounding between two strategies.
EXACT = shlex.split("--norm group --dtype fp64 --image-size 16 --batch-size 24 --workers 0 --log-every 1 --timeout 60")
EXACT += ["--clip-grad-norm", "1"]  # below the norm of every step, which so has to be right
STEPS = ["--max-steps", os.environ.get("STEPS", "4")]


@dataclass
class Result:
    """What a job printed and left."""

    said: str
    losses: list
    norms: list
    evaluation: tuple
    weights: dict


def train(folder, recipe, processes, jobs):
    """{name: Result} of {name: options}, all trained in one set of processes."""
    program = command(Path(__file__), recipe, json.dumps(jobs), processes=processes)
    done = run(program, folder, env=ENV, timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    results = {}
    for said, name in re.findall(r"(?s)(.*?)\ntrained (\S+)", done.stdout):
        results[name] = Result(
            said,
            [float(loss) for loss in re.findall(r"step \d+/\d+  loss (\S+)", said)],
            values(scalars(folder / "runs" / name)["train/gradient_norm"]),
            re.findall(r"evaluation: loss (\S+), (.*)", said)[-1],
            torch.load(folder / f"{name}.pt", weights_only=True),
        )
    assert results.keys() == jobs.keys()
    return results


def work(recipe, jobs):
    module = load(recipe)
    build_data = module.build_data

    def fewer(*args):
        classes, train, val = build_data(*args)
        val.labels, val.source = val.labels[:49], val.source[:49]  # the last batch has one image: replicas have none
        return classes, train, val

    module.build_data = fewer
    for number, (name, options) in enumerate(jobs.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a store of its own
        own = shlex.split(options)
        steps = [] if "--max-steps" in own else STEPS
        sys.argv = [str(recipe), *EXACT, *steps, "--name", name, "--export", f"{name}.pt", *own]
        module.train(module.parse(config_type(module)))
        if dist.get_rank() == 0:
            print(f"trained {name}", flush=True)
        dist.destroy_process_group()


def config_type(module):
    """The options of a recipe: the last subclass of Config."""
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, module.Config)][-1]


def close(ones, others, tolerance=1e-10):
    assert others == pytest.approx(ones, rel=tolerance, abs=0)


def assert_same_weights(one, other, tolerance=1e-10):
    assert one.keys() == other.keys()
    for name in one:
        error = (one[name] - other[name]).abs().max() / one[name].abs().max()
        assert error <= tolerance, f"{name} differs by {error:.2g}"


def assert_same(one, other, tolerance=1e-10):
    assert len(one.losses) >= 3
    close(one.losses, other.losses, tolerance)
    close(one.norms, other.norms, 1e-6)  # float32 in TensorBoard
    assert_same_weights(one.weights, other.weights, tolerance)
    close(float(one.evaluation[0]), float(other.evaluation[0]), tolerance)
    assert one.evaluation[1] == other.evaluation[1]
    assert "/49)" in one.evaluation[1], "each image once"


def assert_resumes_exactly(folder, recipe, *options, processes=1):
    """Float32 and batch norm: 12 steps in one go, and with SIGKILL, a damaged checkpoint and SIGTERM between."""
    small = shlex.split("--image-size 16 --batch-size 24 --max-steps 12 --save-every 2 --log-every 1 --name run")
    words = command(recipe, *small, *options, processes=processes)
    ends = []
    for name in ("undisturbed", "disturbed"):
        path = folder / name / "runs" / "run"
        (folder / name).mkdir()
        if name == "disturbed":
            with start(words, folder / name, ENV) as job:
                wait_until(lambda path=path: len([*path.glob("step_*.pt")]) == 2, 120, "two checkpoints")
                job.signal(signal.SIGKILL)
                wait_until(lambda job=job: not job.processes(), 20, "all processes to end")
            *_, older, newer = sorted(path.glob("step_*.pt"))
            os.truncate(newer, 1000)
            with start(words, folder / name, ENV) as job:
                job.wait_for(f"going on from runs/run/{older.name}", 120)
                job.wait_for(f"step {int(older.stem[5:]) + 2}/12", 120)
                job.signal(signal.SIGTERM)
                job.wait()
            assert status(path)["status"] == "stopped"
            assert status(path)["step"] == newest(path)["step"] < 12
        assert run(words, folder / name, env=ENV).returncode == 0
        assert (status(path)["started_at_step"] > 0) == (name == "disturbed")
        ends.append(newest(path))
    for part in ("model", "momentum"):
        assert ends[0][part].keys() == ends[1][part].keys()
        differ = [name for name in ends[0][part] if not torch.equal(ends[0][part][name], ends[1][part][name])]
        assert not differ, f"{part}: {differ}"
    statistics = "running_mean", "running_var", "num_batches_tracked"
    assert ends[0]["momentum"].keys() == {name for name in ends[0]["model"] if not name.endswith(statistics)}
    for part in ("step", "evaluated", "result", "rows"):
        assert ends[0][part] == ends[1][part]


def refusal(recipe, options, monkeypatch, **environment):
    """What train says to bad options, before it starts anything; test_bad_input.py shows what main makes of it."""
    module = load(recipe)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [recipe.name, *shlex.split(options)])
    with pytest.raises(module.Failure) as failure:
        module.train(module.parse(config_type(module)))
    assert "\n" not in str(failure.value)
    return str(failure.value)


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
