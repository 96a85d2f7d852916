"""Bad input: one clear line in under 15 seconds, exit code 2 (3 for a loss that is not finite), no traceback.

Run as a program, this file runs a recipe's main with each of some command lines, in a process of its own that is
forked after the import of torch: without that, these tests would do little but import.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import run
from strategies import config_type
from training import DDP, ENV, command, each_recipe, image_folder, load, newest, status

# A torch that sees a GPU, which a process learns before it touches one.
FAKE_GPU = "import torch\ntorch.cuda.is_available = lambda: True\ntorch.cuda.device_count = lambda: 1\n"

CASES = {
    "--no-such-option 1": "--no-such-option",
    "--arch resnet19": "resnet19",
    "--batch-size many": "--batch-size",
    "--batch-size 64 --accumulate 5": "60 or 65 would",
    "--batch-size 1500": "only 1438 training images",
    "--data nowhere": "nowhere",
    "--data empty-class": "b",
    "--data no-val": "no-val",
    "--data other-classes": "only one has b2, c",
    "--resume nowhere.pt": "nowhere.pt",
    "--resume text.pt": "text.pt",
    "--resume cut.pt": "cut.pt",
    "--resume pictures": "pictures",
    "--resume good.pt --arch resnet34": "--arch resnet18, not resnet34",
    "--name taken --lr 0.1": "--lr 0.05, not 0.1",
    "--name taken --seed 1 --batch-size 30": "24, not 30; --seed 0, not 1",
    "--norm sync": "CUDA",
    "--dtype fp16": "fp16",
    "--epochs 0": "--epochs 0",
    "--lr -0.1": "--lr -0.1",
    "--lr nan": "--lr nan",
    "--workers -1": "--workers -1",
    "--save-every -5": "--save-every -5",
    "--timeout 0": "--timeout 0",
    "--label-smoothing 2": "--label-smoothing 2",
    "--export nowhere/weights.pt": "nowhere/weights.pt",
}


def check(result, text, code=2):
    """Whether all that was said is one line with the text in it."""
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("ddp_resnet.py: ")
    assert text in result.stderr
    assert not result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data sets with a fault each, and a run of one step."""
    folder = tmp_path_factory.mktemp("bad input")
    image_folder(folder / "pictures")
    for name in ("empty-class", "no-val", "other-classes"):
        image_folder(folder / name, train=2, val=2)
    for path in (folder / "empty-class/train/b").iterdir():
        path.unlink()
    (folder / "no-val/val").rename(folder / "no-val/validation")
    (folder / "other-classes/val/c").rename(folder / "other-classes/val/b2")
    (folder / "text.pt").write_text("This is no checkpoint.\n")
    options = "--max-steps 1 --image-size 16 --batch-size 24 --data pictures --name taken"
    assert run(command(DDP, *shlex.split(options)), folder, env=ENV).returncode == 0
    checkpoint = folder / "runs/taken/step_00000001.pt"
    (folder / "good.pt").write_bytes(checkpoint.read_bytes())
    (folder / "cut.pt").write_bytes(checkpoint.read_bytes()[:100_000])
    return folder


def words(case):
    own = "pictures" if case.startswith(("--resume", "--name")) else "digits"
    options = {"--data": own, "--image-size": "16", "--batch-size": "24", "--max-steps": "1"}
    given = shlex.split(case)
    return [word for option, value in options.items() if option not in given for word in (option, value)] + given


@pytest.fixture(scope="module")
def results(folder):
    """All cases, by one program."""
    done = run(["python", __file__, DDP, json.dumps([*map(words, CASES)])], folder, env=ENV)
    assert done.returncode == 0, done.stderr
    ends = [subprocess.CompletedProcess(case, *end) for case, end in zip(CASES, json.loads(done.stdout), strict=True)]
    return dict(zip(CASES, ends, strict=True))


def attempt(module, options):
    """[exit code, standard output, standard error] of the recipe's main."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            signal.alarm(15)  # ends a case that takes longer
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv[1:] = options
            try:
                module.main(config_type(module))
            except SystemExit as end:
                os._exit(end.code)
            finally:
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
        return [code, *texts]


@pytest.mark.parametrize("case", CASES)
def test_one_line(results, case):
    if CASES[case] == "CUDA" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    check(results[case], CASES[case])


def test_quickly(folder):
    begun = [time.monotonic()]
    assert run(command(DDP, "--help"), folder, env=ENV).returncode == 0  # says how fast this machine is now
    for case in ("--no-such-option 1", "--resume cut.pt"):
        begun.append(time.monotonic())
        check(run(command(DDP, *words(case)), folder, env=ENV), CASES[case])
        assert time.monotonic() - begun[-1] < max(15, 4 * (begun[1] - begun[0]))


def test_nothing_is_touched(results, folder):
    assert [path.name for path in (folder / "runs").iterdir()] == ["taken"], "a refused run has no directory"
    assert (folder / "good.pt").read_bytes() == (folder / "runs/taken/step_00000001.pt").read_bytes()
    assert status(folder / "runs/taken")["status"] == "finished"


def test_unwritable_run_directory(tmp_path):
    (tmp_path / "runs").write_text("in the way\n")
    check(run(command(DDP, "--max-steps", "1"), tmp_path, env=ENV), "cannot write to the run directory runs/")


@pytest.mark.parametrize(
    "options, text, env",
    [
        ("--batch-size 63", "62 or 64 would", {}),
        ("--max-steps 1", "2 processes for 1 GPUs", {"PYTHONPATH": "fake gpu"}),
    ],
    ids=["not divisible", "too few GPUs"],
)
def test_one_line_under_torchrun(tmp_path, options, text, env):
    (tmp_path / "fake gpu").mkdir()
    (tmp_path / "fake gpu" / "sitecustomize.py").write_text(FAKE_GPU)
    result = run(command(DDP, *shlex.split(options), processes=2), tmp_path, env={**ENV, **env})
    assert result.returncode == 1
    assert result.stderr.count(text) == 1, result.stderr
    assert result.stderr.count("ddp_resnet.py: ") == 1
    assert "[rank" not in result.stderr, "no traceback of a worker"


def test_a_loss_that_is_not_finite(tmp_path):
    image_folder(tmp_path / "pictures")
    options = "--data pictures --image-size 16 --batch-size 12 --save-every 1 --log-every 1 --name lost"
    result = run(command(DDP, *shlex.split(options), "--lr", "1e20", "--warmup-epochs", "0"), tmp_path, env=ENV)
    assert result.returncode == 3, result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("ddp_resnet.py: ")]
    assert "Traceback" not in result.stderr
    path = tmp_path / "runs" / "lost"
    step = newest(path)["step"]
    assert f"in step {step + 1}; the newest checkpoint is of step {step}" in line
    assert status(path)["status"] == "failed"
    assert f"ddp_resnet.py: {status(path)['reason']}" == line
    assert all(tensor.isfinite().all() for tensor in newest(path)["model"].values())


@each_recipe
def test_every_recipe_says_it_in_one_line(tmp_path, recipe):
    if recipe == DDP:
        pytest.skip("tested above")
    result = run(command(recipe, "--data", "nowhere"), tmp_path, env=ENV)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith(f"{recipe.name}: ")]
    assert len(said) == 1, result.stderr
    assert "--data nowhere" in said[0]
    assert "[rank" not in result.stderr


if __name__ == "__main__":
    module = load(Path(sys.argv[1]))
    print(json.dumps([attempt(module, options) for options in json.loads(sys.argv[2])]))
