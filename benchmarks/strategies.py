"""The strategies beside each other, on the same devices: speed and memory against one device.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --arch resnet50 --image-size 224 --batch-size 256 --devices 4

Every strategy trains on generated images with the same global batch; the figures are medians over interleaved
rounds. Without GPUs a device is a core: recipes with one process per device have a thread in each, recipes that
drive all devices from one process have as many threads. The machine must be quiet.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@dataclass
class Options:
    arch: str = "resnet18"
    image_size: int = 64
    batch_size: int = 128
    devices: int = 2
    rounds: int = 3
    steps: int = 9


def measure(recipe: str, processes: int, threads: int, options: Options, *words: str) -> tuple[float, float]:
    """Images per second, and GiB of the device that needs most."""
    start = ["torchrun", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else [sys.executable]
    size = f"--arch {options.arch} --image-size {options.image_size} --batch-size {options.batch_size}"
    length = f"--max-steps {options.steps} --log-every {options.steps // 3} --eval-every 999 --name run"
    command = [*start, RECIPES / recipe, "--data", "synthetic", *size.split(), *length.split(), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    speeds = [float(speed) for speed in re.findall(r"(\d+) images/s", done.stdout)]
    return statistics.median(speeds[1:]), float(re.search(r"at most (\S+) GiB per device", done.stdout)[1])


def main(options: Options) -> None:
    many, gpus = options.devices, torch.cuda.device_count()
    given = ["--devices", ",".join(f"cuda:{k}" for k in range(many)) if gpus else "cpu"]
    stages = ["--devices", given[1] if gpus else ",".join(["cpu"] * many)]
    strategies = {
        "one device": ("ddp_resnet.py", 1, 1),
        "ddp": ("ddp_resnet.py", many, 1),
        "fsdp": ("fsdp_resnet.py", many, 1),
        "pp": ("pp_resnet.py", many, 1),
        "mp": ("mp_resnet.py", 1, many, *stages),
        "mp, naive": ("mp_resnet.py", 1, many, *stages, "--micro-batches", "1"),
        "dp": ("dp_resnet.py", 1, many, *given),
    }
    measured = {name: [] for name in strategies}
    for _ in range(options.rounds):
        for name, (recipe, processes, threads, *words) in strategies.items():
            measured[name].append(measure(recipe, processes, threads, options, *words))
    middle = {
        name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in measured.items()
    }
    speed, memory = middle["one device"]
    print(f"{options}, {'GPUs' if gpus else 'CPU cores'}\n\n{'':12}images/s   speed  memory per device")
    for name, (own_speed, own_memory) in middle.items():
        print(f"{name:12}{own_speed:8.0f}{own_speed / speed:8.2f}{own_memory / memory:8.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
