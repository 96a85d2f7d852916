"""Does a pipeline pay? recipes/pp_resnet.py in two processes of one thread each, beside one process of one thread.

    python benchmarks/pipeline.py

Prints two ratios for each schedule and number of micro-batches, medians over interleaved rounds: the images per
second against one process with the whole batch, and what part that is of the bound, which the stages' own times
allow. For the bound, both processes run their stages' forward and backward passes, at the size of a micro-batch
and at the same time, but alone: no one waits or sends. The schedule is then played with these times. The machine
must be quiet, and have a core for each process.
"""

import contextlib
import importlib.util
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "pp_resnet.py"


@dataclass
class Options:
    arch: str = "resnet18"
    image_size: int = 64
    batch_size: int = 128
    rounds: int = 7
    schedules: tuple[str, ...] = ("gpipe-4", "gpipe-8", "1f1b-4", "1f1b-8", "interleaved-4", "interleaved-8")


def load():
    spec = importlib.util.spec_from_file_location("pp_resnet", RECIPE)
    module = sys.modules["pp_resnet"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stage_seconds(pipeline):
    """(stage, seconds of its forward pass, seconds of its backward pass), for the stages of this process."""
    schedule, found = pipeline.schedule, []
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        meta = stage._user_meta.inputs[0]
        forward, backward = [], []
        for _ in range(pipeline.config.micro_batches):
            inputs = torch.randn(meta.shape, requires_grad=stage.stage_index > 0)
            began = time.perf_counter()
            output = stage.submod(inputs)
            middle = time.perf_counter()
            output.backward(torch.ones_like(output))
            forward.append(middle - began)
            backward.append(time.perf_counter() - middle)
        found.append((stage.stage_index, statistics.mean(forward), statistics.mean(backward)))
    pipeline.zero_grad()
    return found


def main(options: Options) -> None:
    recipe, device = load(), torch.device("cpu")
    shared = {"arch": options.arch, "image_size": options.image_size, "batch_size": options.batch_size}
    config = recipe.PipelineParallel(**shared)
    recipe.setup_distributed(config, device)
    run = SimpleNamespace(device=device, timed=lambda what: contextlib.nullcontext())
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    labels = torch.arange(options.batch_size) % 10

    def one_process():
        loss = recipe.sum_loss(model(images), labels, config) / options.batch_size
        loss.backward()
        recipe.optimizer_step(config, model, optimizer, 0.01)

    model = recipe.build_model(config, 10, device)
    optimizer = recipe.build_optimizer(config, model)
    pipelines = {}
    for name in options.schedules:
        schedule, micro_batches = name.split("-")
        own = recipe.PipelineParallel(**shared, schedule=schedule, micro_batches=int(micro_batches))
        part, cut = recipe.build_model(own, 10, device), recipe.settle_cut(own, dist.get_world_size())
        pipeline = recipe.Pipeline(own, part, cut, recipe.build_mesh(own, device), run)
        pipelines[name] = pipeline, part, recipe.build_optimizer(own, part)

    def step(pipeline, part, optimizer):
        pipeline.step(images, labels)
        recipe.optimizer_step(pipeline.config, part, optimizer, 0.01, pipeline.total_norm)

    def timed(work, *args):
        dist.barrier()
        began = time.perf_counter()
        work(*args)
        dist.barrier()
        return time.perf_counter() - began

    speedups, parts = {name: [] for name in pipelines}, {name: [] for name in pipelines}
    for number in range(options.rounds + 1):  # the first of them warms up
        alone = timed(one_process) if dist.get_rank() == 0 else timed(lambda: None)
        for name, (pipeline, *rest) in pipelines.items():
            took = timed(step, pipeline, *rest)
            dist.barrier()
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, stage_seconds(pipeline))
            seconds = [times for _, *times in sorted(sum(found, []))]
            ideal = recipe.ideal_seconds(pipeline.schedule.pipeline_order, seconds)
            if number:
                speedups[name].append(alone / took)
                parts[name].append(ideal / took)
    if dist.get_rank() == 0:
        print(f"{'schedule':<16}{'blocks':<12}{'speed-up':>9}{'of bound':>9}    range of speed-ups")
        for name, (pipeline, *_) in pipelines.items():
            speed, part = statistics.median(speedups[name]), statistics.median(parts[name])
            sizes, low, high = "+".join(map(str, pipeline.sizes)), min(speedups[name]), max(speedups[name])
            print(f"{name:<16}{sizes:<12}{speed:>9.2f}{part:>9.2f}    {low:.2f} to {high:.2f}")
        best = max(pipelines, key=lambda name: statistics.median(speedups[name]))
        print(
            f"best: {best}, {statistics.median(speedups[best]):.2f} x one process, "
            f"{statistics.median(parts[best]):.2f} of its bound, medians of {options.rounds} rounds; "
            f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *sys.argv]
        os.execve(sys.executable, program, {**os.environ, "OMP_NUM_THREADS": "1"})
    main(tyro.cli(Options))
