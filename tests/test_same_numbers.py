"""The same numbers whatever the processes, accumulation and loader workers, and in every recipe.

Double precision and a norm that knows no batch leave nothing but rounding between two runs. Run this
file as a program to write golden_losses.json anew, after a change that is meant to change them.
"""

import functools
import json
import re
import shlex
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import run, start
from training import DDP, ENV, command, each_recipe, scalars, status, values

GOLDEN = Path(__file__).with_name("golden_losses.json")
OPTIONS = shlex.split(
    "--norm group --dtype fp64 --image-size 16 --batch-size 48 --max-steps 8 --name same --export w.pt"
)
ONE = "--log-every", "1", "--workers", "0"


class Trained:
    """What came of a run. The console has all digits of an fp64 run, TensorBoard has float32."""

    def __init__(self, folder, recipe, processes, *options):
        folder.mkdir(exist_ok=True)
        recipe = Path(shutil.copy2(recipe, folder))  # a recipe stands alone, with nothing of ours to import
        result = run(command(recipe, *OPTIONS, *options, processes=processes), folder, env={**ENV, "PYTHONPATH": ""})
        assert result.returncode == 0, result.stderr
        assert {path.name for path in folder.iterdir()} <= {recipe.name, "runs", "w.pt"}
        steps = re.findall(r"^step \d+/8  loss (\S+)  accuracy (\S+)", result.stdout, re.M)
        self.losses, self.accuracies = ([float(number) for number in column] for column in zip(*steps, strict=True))
        self.evaluation, self.hits = re.search(
            r"evaluation: loss (\S+), top-1 .* \((\d+/\d+)\)", result.stdout
        ).groups()
        curves = scalars(folder / "runs" / "same")
        assert close(self.losses, values(curves["train/loss"])[-len(self.losses) :], 1e-6)
        self.top5, self.norms = curves["eval/top5"], values(curves["train/gradient_norm"])
        self.weights = torch.load(folder / "w.pt", weights_only=True)
        shutil.rmtree(folder)  # 270 MB


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(recipe, processes, *options), which does each run once."""
    return functools.cache(lambda *key: Trained(tmp_path_factory.mktemp("empty folder"), *key))


def close(one, other, tolerance=1e-10):
    return len(one) == len(other) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(one, other, strict=True))


def check_same_end(one, other):
    """The weights, and the evaluation of all 359 images (a prime number), each counted once."""
    assert one.weights.keys() == other.weights.keys()
    for name in one.weights:
        error = (one.weights[name] - other.weights[name]).abs().max() / one.weights[name].abs().max()
        assert error <= 1e-10, f"{name} differs by {error:.2g}"
    assert one.hits == other.hits
    assert one.hits.endswith("/359")
    assert one.top5 == other.top5
    assert close([float(one.evaluation)], [float(other.evaluation)])


@each_recipe
def test_golden_losses(trained, recipe):
    got, golden = trained(recipe, None, *ONE), json.loads(GOLDEN.read_text())
    # Another processor sums in another order, and eight steps enlarge that; a change of meaning is far larger.
    assert close(golden["losses"], got.losses, 1e-8), got.losses
    assert close([float(golden["evaluation"])], [float(got.evaluation)], 1e-8)
    assert got.hits == golden["hits"]


@pytest.mark.parametrize(
    "processes, accumulate, workers, every", [(2, 2, 1, 1), (3, 4, 3, 4), (4, 1, 0, 1)], ids=["two", "three", "four"]
)
def test_processes_accumulation_and_workers_change_nothing(trained, processes, accumulate, workers, every):
    one = trained(DDP, None, *ONE)
    options = "--accumulate", str(accumulate), "--workers", str(workers), "--log-every", str(every)
    many = trained(DDP, processes, *options)
    for name, digits in (("losses", 1e-10), ("accuracies", 1e-3), ("norms", 1e-6)):
        each = getattr(one, name)
        means = [sum(each[k : k + every]) / every for k in range(0, 8, every)]
        assert close(means, getattr(many, name), digits), (name, means, getattr(many, name))
    check_same_end(one, many)


def test_goes_on_with_fewer_processes(trained, tmp_path):
    one = trained(DDP, None, *ONE)
    with start(command(DDP, *OPTIONS, "--log-every", "1", processes=4), tmp_path, ENV) as job:
        job.wait_for("step 3/8")
        job.signal(signal.SIGTERM)
        job.wait()
    step = status(tmp_path / "runs" / "same")["step"]
    assert 3 <= step < 8
    two = Trained(tmp_path, DDP, 2, "--log-every", "1")
    assert close(one.losses[step:], two.losses)
    check_same_end(one, two)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        one = Trained(Path(folder, "golden"), DDP, None, *ONE)
    golden = {"losses": one.losses, "evaluation": one.evaluation, "hits": one.hits}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
