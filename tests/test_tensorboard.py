"""What TensorBoard shows of a run that was killed and went on, read back with TensorBoard's own loader."""

import io
import json
import shlex
import signal

import numpy as np
import pytest
from conftest import run, start
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray
from torchvision.utils import make_grid
from training import DDP, ENV, command, events, image_folder, load, scalars, status, values

# 60 + 24 images: five steps an epoch, an evaluation after steps 5, 10 and 12.
OPTIONS = shlex.split(
    "--data pictures --image-size 16 --batch-size 12 --max-steps 12 --log-every 1 --save-every 4 --lr 0.01 "
    "--epochs 4 --name shown"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run killed after step 10, whose newest checkpoint is of step 8, finished by the same command, and given that
    command once more, when nothing is left to do."""
    folder = tmp_path_factory.mktemp("tensorboard")
    image_folder(folder / "pictures")
    with start(command(DDP, *OPTIONS), folder, ENV) as job:
        job.wait_for("step 10/12  evaluation")
        job.signal(signal.SIGKILL)
    assert run(command(DDP, *OPTIONS, "--profile"), folder, env=ENV).returncode == 0
    assert status(folder / "runs/shown")["started_at_step"] == 8
    assert run(command(DDP, *OPTIONS), folder, env=ENV).returncode == 0
    assert status(folder / "runs/shown")["started_at_step"] == 12
    return folder


@pytest.fixture(scope="module")
def path(folder):
    return folder / "runs/shown"


def test_every_curve_once(path):
    curves = scalars(path)
    train = ["loss", "accuracy", "learning_rate", "gradient_norm"]
    speed = ["images_per_second", "step_ms", "data_wait_fraction", "slowest_over_fastest_rank"]
    every_step = {*(f"train/{name}" for name in train), *(f"speed/{name}" for name in speed), "memory/device_0_gib"}
    evaluated = {"eval/loss", "eval/top1", "eval/top5"}
    assert curves.keys() == every_step | evaluated
    for tag in every_step:
        assert [step for step, _ in curves[tag]] == list(range(1, 13)), tag
    for tag in evaluated:
        assert [step for step, _ in curves[tag]] == [5, 10, 12], tag


def test_the_files_do_hold_steps_twice(path):
    """Else the test above would show nothing."""
    steps = []
    for file in sorted(path.glob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            steps += [event.step for value in event.summary.value if value.tag == "train/loss"]
    assert steps == [*range(1, 11), *range(9, 13)]


def test_values_are_sound(path):
    curves = {tag: values(curve) for tag, curve in scalars(path).items()}
    # Linear over the first epoch of five steps, then a cosine over three, taken in the middle of each step.
    warmup = [0.01 * (step + 0.5) / 5 for step in range(5)]
    cosine = [0.005 * (1 + np.cos(np.pi * (step + 0.5 - 5) / 15)) for step in range(5, 12)]
    assert np.allclose(curves["train/learning_rate"], warmup + cosine)
    assert all(0 <= value <= 1 for tag in ("train/accuracy", "eval/top1") for value in curves[tag])
    assert curves["eval/top5"] == [1, 1, 1], "of three classes"
    assert all(
        value == round(value * 24) / 24 or abs(value * 24 - round(value * 24)) < 1e-5 for value in curves["eval/top1"]
    )
    assert all(value > 0 for tag in ("train/loss", "eval/loss", "train/gradient_norm") for value in curves[tag])
    assert all(0 < value < 20 for value in curves["memory/device_0_gib"])
    assert all(0 <= value <= 1 for value in curves["speed/data_wait_fraction"])
    assert curves["speed/slowest_over_fastest_rank"] == [1] * 12
    for rate, milliseconds in zip(curves["speed/images_per_second"], curves["speed/step_ms"], strict=True):
        assert np.isclose(rate * milliseconds, 12_000, rtol=1e-4)


def picture(shown, tag):
    """The last image of a tag as an array, height x width x 3."""
    *_, data = make_ndarray(shown.Tensors(tag)[-1].tensor_proto).tolist()
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def test_pictures(folder, path, monkeypatch):
    monkeypatch.chdir(folder)
    shown, recipe = events(path), load(DDP)
    config = recipe.Config(data="pictures", image_size=16, batch_size=12)
    _, (train, _) = recipe.scan("pictures")
    batch, *_ = recipe.Images(*train, config, train=True)[next(recipe.train_batches(config, 60, 0, 1, 0, 1))]
    assert np.array_equal(picture(shown, "train/input"), make_grid(batch).permute(1, 2, 0).numpy())
    wrong = round(24 * (1 - values(scalars(path)["eval/top1"])[-1]))
    rows, columns = -(-min(wrong, 16) // 4), min(wrong, 4)
    assert picture(shown, "eval/wrong").shape == (2 + 130 * rows, 2 + 130 * columns, 3)
    assert [event.step for event in shown.Tensors("eval/wrong")][-1] == 12


def test_options_in_one_run(folder, path):
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder / "runs")).Reload().Runs()
    assert list(runs) == ["shown"], "add_hparams would make a run of its own"
    shown = events(path)
    [text] = make_ndarray(shown.Tensors("config/text_summary")[0].tensor_proto).tolist()
    assert "batch_size: 12" in text.decode()
    content = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    options = HParamsPluginData.FromString(content).session_start_info.hparams
    assert options["lr"].number_value == 0.01
    assert json.loads((path / "config.json").read_text())["lr"] == 0.01


def test_profile(path):
    [trace] = [file for file in path.iterdir() if "trace" in file.name]
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("conv" in str(name) for name in names)
