"""What the tests of the strategies share: the same numbers as ddp, and the same end after a restart."""

import re
import shlex
import signal

import pytest
import torch
from conftest import run, start, wait_until
from training import DDP, ENV, command, load, newest, status

# Double precision and a norm that knows no batch leave nothing but rounding between two strategies.
EXACT = shlex.split("--norm group --dtype fp64 --image-size 16 --batch-size 24 --workers 0 --log-every 1")
EXACT += ["--clip-grad-norm", "1"]  # below the norm of every step, which so has to be right


def trained(folder, recipe, *options, processes=1):
    """The losses and final weights of a run in the folder."""
    words = command(recipe, *EXACT, "--name", "run", "--export", "w.pt", *options, processes=processes)
    result = run(words, folder, timeout=300, env=ENV)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+/\d+  (?:evaluation: )?loss ([\d.]+)", result.stdout, re.M)]
    return losses, torch.load(folder / "w.pt", weights_only=True), result


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Six steps of ddp on one process."""
    return trained(tmp_path_factory.mktemp("ddp"), DDP, "--max-steps", "6")


def assert_same(one, other, tolerance=1e-10):
    (losses, weights, _), (other_losses, other_weights, _) = one, other
    assert other_losses == pytest.approx(losses, rel=tolerance, abs=0)
    assert len(losses) >= 2
    assert other_weights.keys() == weights.keys()
    for name in weights:
        error = (weights[name] - other_weights[name]).abs().max() / weights[name].abs().max()
        assert error <= tolerance, f"{name} differs by {error:.2g}"


def assert_resumes_exactly(folder, recipe, *options, processes=1):
    """Float32 and batch norm: 12 steps in one go, and with SIGKILL and SIGTERM between."""
    small = shlex.split("--image-size 16 --batch-size 24 --max-steps 12 --save-every 2 --log-every 1 --name run")
    words = command(recipe, *small, *options, processes=processes)
    ends = []
    for name, plan in (("undisturbed", []), ("disturbed", [signal.SIGKILL, signal.SIGTERM])):
        path = folder / name / "runs" / "run"
        (folder / name).mkdir()
        for number in plan:
            with start(words, folder / name, ENV) as job:
                if number == signal.SIGKILL:
                    wait_until(lambda path=path: any(path.glob("step_*.pt")), 120, "a checkpoint")
                else:
                    began = newest(path)["step"]
                    job.wait_for(f"step {began + 2}/12", 120)
                job.signal(number)
                if number == signal.SIGKILL:
                    wait_until(lambda job=job: not job.processes(), 20, "all processes to end")
                else:
                    job.wait()
                    assert status(path)["status"] == "stopped"
            assert 0 < newest(path)["step"] < 12
        assert run(words, folder / name, env=ENV).returncode == 0
        assert (status(path)["started_at_step"] > 0) == bool(plan)
        ends.append(newest(path))
    for part in ("model", "momentum"):
        assert ends[0][part].keys() == ends[1][part].keys()
        differ = [name for name in ends[0][part] if not torch.equal(ends[0][part][name], ends[1][part][name])]
        assert not differ, f"{part}: {differ}"
    statistics = "running_mean", "running_var", "num_batches_tracked"
    assert ends[0]["momentum"].keys() == {name for name in ends[0]["model"] if not name.endswith(statistics)}
    for part in ("scaler", "step", "evaluated", "result", "rows"):
        assert ends[0][part] == ends[1][part]


def refusal(recipe, options, monkeypatch, **environment):
    """What train says to bad options, before it starts anything; test_bad_input.py shows what main makes of it."""
    module = load(recipe)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [recipe.name, *shlex.split(options)])
    config_type = [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, module.Config)
    ][-1]
    with pytest.raises(module.Failure) as failure:
        module.train(module.parse(config_type))
    assert "\n" not in str(failure.value)
    return str(failure.value)
