"""What the tests of the recipes share: how a recipe is started, and what its run left behind."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

# RECIPES=folder tests other recipes, such as a copy that was broken to see a test fail.
RECIPES = Path(os.environ.get("RECIPES", ROOT / "recipes")).resolve()
ALL = sorted(RECIPES.glob("*_resnet.py"))
DDP = RECIPES / "ddp_resnet.py"
PROCESSES = {"fsdp_resnet.py": 2, "pp_resnet.py": 2}  # of recipes that with one would do nothing of their own
ENV = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it

each_recipe = pytest.mark.parametrize("recipe", ALL, ids=[path.stem for path in ALL])


def command(recipe, *options, processes=None, torchrun=()):
    """python for one process, else torchrun; by default as few processes as show what the recipe is for."""
    processes = processes or PROCESSES.get(recipe.name, 1)
    start = ["torchrun", "--standalone", f"--nproc_per_node={processes}", *torchrun]
    return [*(start if processes > 1 else ["python"]), recipe, *options]


def load(recipe):
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module
    spec.loader.exec_module(module)
    return module


def workers(job):
    """{rank: pid} of the recipe's processes under torchrun, which has no other children with a rank."""
    environments = {child.pid: child.environ() for child in psutil.Process(job.pid).children()}
    return {int(env["RANK"]): pid for pid, env in environments.items() if "RANK" in env}


def status(run):
    return json.loads((run / "status.json").read_text())


def newest(run):
    """The newest checkpoint."""
    return torch.load(max(run.glob("step_*.pt")), weights_only=True)


def events(run):
    """The run as TensorBoard shows it: all its files, without what a restart has purged."""
    return EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()


def scalars(run):
    """{tag: [(step, value), ...]} as TensorBoard draws it; a curve that doubles back is an error."""
    shown = events(run)
    tags = [tag for tag in shown.Tags()["tensors"] if shown.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"]
    curves = {tag: [(e.step, make_ndarray(e.tensor_proto).item()) for e in shown.Tensors(tag)] for tag in tags}
    for tag, curve in curves.items():
        steps = [step for step, _ in curve]
        assert steps == sorted(set(steps)), f"{tag} doubles back: {steps}"
    return curves


def values(curve):
    return [value for _, value in curve]


def photograph(width, height, seed=0):
    """Waves, a disc and a frame: smooth and sharp parts in colour, as in a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    waves = [np.sin(2 * np.pi * (a * x + b * y) + c) for a, b, c in rng.uniform(-4, 4, (3, 3))]
    pixels = 127 + 70 * np.stack(waves, axis=2)
    pixels[(x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.06] = rng.uniform(0, 255, 3)
    pixels[: height // 9] = rng.uniform(0, 255, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def image_folder(folder, train=20, val=8, size=(24, 20), form="png"):
    """A small ImageFolder of three classes, with so many images a class."""
    for split, count in (("train", train), ("val", val)):
        for k in range(3 * count):
            path = folder / split / "abc"[k % 3] / f"{k}.{form}"
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph(*size, seed=k if split == "train" else 1000 + k).save(path)
    return folder
