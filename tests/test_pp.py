"""The pipeline: the same numbers as ddp on one process, however it is cut, scheduled and interrupted.

Run as a program by torchrun, this file trains a recipe once per job in one set of processes, as most of a
short run's time goes by while Python imports torch.
"""

import functools
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchvision
from conftest import run, start, wait_until
from training import DDP, ENV, RECIPES, command, load, scalars, status, values, workers

PP = RECIPES / "pp_resnet.py"
OPTIONS = ["--norm", "group", "--dtype", "fp64", "--image-size", "16", "--batch-size", "24", "--workers", "0"]
OPTIONS += ["--log-every", "1", "--timeout", "60"]
STEPS = 4
CASES = {
    2: [
        *itertools.product([2], ["gpipe"], [1, 2, 4, 8]),
        *itertools.product([2], ["1f1b", "interleaved"], [2, 4, 8]),
    ],
    3: [(3, "gpipe", 2), (3, "1f1b", 4), (3, "interleaved", 4), (3, "interleaved", 8)],
    4: [(2, "gpipe", 1), (2, "1f1b", 2), (2, "interleaved", 4)],
}
LONG = ["--max-steps", "12", "--micro-batches", "4"]
BATCH_NORM = ["--norm", "batch", "--max-steps", "3"]


def label(processes, stages, schedule, micro_batches):
    return f"{processes}-{stages}-{schedule}-{micro_batches}"


def pipeline(processes):
    """The jobs of a pipeline in so many processes."""
    for case in CASES[processes]:
        options = zip(["--stages", "--schedule", "--micro-batches"], map(str, case), strict=True)
        yield [*itertools.chain(*options), "--max-steps", str(STEPS), "--name", label(processes, *case)]


def work(recipe, jobs):
    module = load(recipe)
    build_data = module.build_data

    def fewer(*args):
        classes, train, val = build_data(*args)
        val.labels, val.source = val.labels[:53], val.source[:53]  # a prime number
        return classes, train, val

    module.build_data = fewer
    for number, job in enumerate(jobs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a store of its own
        name = job[job.index("--name") + 1]
        sys.argv = [str(recipe), *OPTIONS, "--export", f"{name}.pt", *job]
        module.train(module.parse(getattr(module, "PipelineParallel", module.Config)))
        if dist.get_rank() == 0:
            print(f"trained {name}", flush=True)
        dist.destroy_process_group()


class Trained:
    """What jobs printed and left, by their names."""

    def __init__(self, folder):
        self.folder, self.stdout = folder, {}

    def train(self, recipe, processes, *jobs):
        program = command(__file__, recipe, json.dumps(jobs), processes=processes)
        result = run(program, self.folder, env=ENV, timeout=500)
        assert result.returncode == 0, result.stderr + result.stdout
        for text, name in re.findall(r"(?s)(.*?)\ntrained (\S+)", result.stdout):
            self.stdout[name] = text

    @functools.cache  # noqa: B019
    def need(self, processes):
        """Train what a number of processes has to; 0: the end of the chain."""
        chain = ["--name", "chain", "--max-steps"]
        one = ["--name", "one", "--max-steps", str(STEPS)]
        accumulated = ["--name", "accumulated", *BATCH_NORM, "--accumulate", "4"]
        normed = ["--name", "micro-batches", *BATCH_NORM, "--micro-batches", "4", "--balance", "3,5"]
        if processes == 1:
            self.train(DDP, 1, one, accumulated, [*chain, "1"])
        elif processes == 2:
            self.train(PP, 2, *pipeline(2), ["--name", "long", *LONG], normed, [*chain, "2"])
        elif processes == 3:
            self.train(PP, 3, *pipeline(3))
        elif processes == 4:
            self.train(PP, 4, *pipeline(4), [*chain, "3", "--stages", "2", "--schedule", "interleaved"])
        else:
            self.train(DDP, 1, [*chain, "4"])

    def losses(self, name):
        return [float(loss) for loss in re.findall(r"step \d+/\d+  loss (\S+)", self.stdout[name])]

    def evaluation(self, name):
        loss, top1 = re.findall(r"evaluation: loss (\S+), (.*)", self.stdout[name])[-1]
        return float(loss), top1

    def weights(self, name):
        return torch.load(self.folder / f"{name}.pt", weights_only=True)

    def norms(self, name):
        return values(scalars(self.folder / "runs" / name)["train/gradient_norm"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trained = Trained(tmp_path_factory.mktemp("pp"))
    trained.need(1)
    return trained


def close(ones, others, tolerance=1e-10):
    assert len(ones) == len(others)
    assert all(abs(one - other) <= tolerance * abs(one) for one, other in zip(ones, others, strict=True)), (
        ones,
        others,
    )


def same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).abs().max() <= 1e-10 * one[name].abs().max(), name


def same_results(trained, one, other):
    same_weights(trained.weights(one), trained.weights(other))
    evaluations = trained.evaluation(one), trained.evaluation(other)
    close(*([loss] for loss, _ in evaluations))
    assert evaluations[0][1] == evaluations[1][1]
    assert "/53)" in evaluations[0][1], "each image once"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [label(n, *case) for n in CASES for case in CASES[n]])
def test_same_numbers(trained, case):
    trained.need(int(case[0]))
    close(trained.losses("one"), trained.losses(case))
    close(trained.norms("one"), trained.norms(case), 1e-6)  # float32 in TensorBoard
    same_results(trained, "one", case)


def test_goes_on_under_any_strategy(trained):
    """Stopped three times, on its way from ddp through pipelines of 2 and of 2 x 2 processes to ddp."""
    for processes in (2, 4, 0):
        trained.need(processes)
    close(trained.losses("one")[-1:], trained.losses("chain"))
    same_results(trained, "one", "chain")


def test_batch_norm_is_that_of_accumulation(trained):
    """Running statistics included; and torchvision's own model takes the weights."""
    trained.need(2)
    close(trained.losses("accumulated"), trained.losses("micro-batches"))
    same_results(trained, "accumulated", "micro-batches")
    torchvision.models.resnet18(num_classes=10).load_state_dict(trained.weights("micro-batches"))


def test_bubble(trained):
    trained.need(2)
    ideal, measured = re.search(
        r"bubble: ideal (\S+)%, measured (\S+)% in 2 steps", trained.stdout["2-2-gpipe-1"]
    ).groups()
    assert float(ideal) == 50  # one stage at a time, whatever the cut
    assert 20 < float(measured) < 80
    assert "3 + 5 blocks" in trained.stdout["micro-batches"]


def test_a_disturbed_run_ends_bit_for_bit_like_an_undisturbed_one(trained, tmp_path):
    trained.need(2)
    options = *OPTIONS, *LONG, "--name", "long", "--save-every", "2", "--export", "long.pt"
    recipe, path = command(PP, *options, processes=2, torchrun=["--max-restarts=1"]), tmp_path / "runs/long"
    with start(recipe, tmp_path, ENV) as job:
        job.wait_for("step 3/12")
        job.signal(signal.SIGTERM)
        job.wait(60)
    assert (status(path)["status"], status(path)["reason"]) == ("stopped", "SIGTERM")
    assert 3 <= status(path)["step"] < 12
    with start(recipe, tmp_path, ENV) as job:
        wait_until(lambda: list(path.glob("step_*[68].pt")), 60, "a checkpoint")
        os.kill(workers(job)[1], signal.SIGKILL)
        result = job.wait(120)
    assert status(path)["started_at_step"] >= 6
    assert result.returncode == 0, result.stderr
    one, other = trained.weights("long"), torch.load(tmp_path / "long.pt", weights_only=True)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def recipe():
    return load(PP)


def test_balance_is_the_best_of_all_cuts(recipe):
    generator = torch.Generator().manual_seed(0)
    for blocks, stages in [(8, 1), (8, 2), (8, 3), (9, 5), (6, 6)]:
        costs = torch.rand(blocks, generator=generator).tolist()
        cuts = [(0, *cut, blocks) for cut in itertools.combinations(range(1, blocks), stages - 1)]
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        sizes = recipe.balance(costs, stages)
        ends = [0, *itertools.accumulate(sizes)]
        assert len(sizes) == stages and ends[-1] == blocks and min(sizes) > 0
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) == best


def order(stages, micro_batches, warm_up):
    """Forward passes to warm up, then one backward and one forward pass, then the rest: by stage."""
    orders = {}
    for stage in range(stages):
        ahead = min(warm_up(stage), micro_batches)
        kinds = "F" * ahead + "BF" * (micro_batches - ahead) + "B" * ahead
        orders[stage] = [None, *((stage, kind, 0) for kind in kinds)]
    return orders


@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (2, 4), (4, 4), (3, 8)])
def test_ideal_seconds(recipe, stages, micro_batches):
    gpipe = order(stages, micro_batches, lambda stage: micro_batches)
    one_f_one_b = order(stages, micro_batches, lambda stage: stages - stage)
    for each in (gpipe, one_f_one_b):
        assert recipe.ideal_seconds(each, [(1, 2)] * stages) == 3 * (micro_batches + stages - 1)
    uneven = [(1, 2)] * (stages - 1) + [(2, 4)]
    assert recipe.ideal_seconds(gpipe, uneven) == 3 * (stages - 1) + 6 * micro_batches


BAD = {
    "--stages 2": "doesn't divide the 3 processes",
    "--stages 9": "only 8 blocks",
    "--schedule interleaved --stages 6": "only 8 blocks to cut in 12",
    "--micro-batches 2": "needs one per stage, 3, or more",
    "--schedule interleaved --micro-batches 2": "needs one per stage, 3, or more",
    "--schedule interleaved --micro-batches 7": "6 would fit",
    "--balance 4,4": "resnet18's 8 blocks cut in 3",
    "--balance 3,3,3": "resnet18's 8 blocks cut in 3",
    "--balance 8,0,0": "resnet18's 8 blocks cut in 3",
    "--balance 3,3": "resnet18's 8 blocks cut in 3",
    "--balance even": "not auto",
    "--schedule interleaved --balance 2,3,3": "cut in 6",
    "--micro-batches 5": "60 or 65 would",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input(recipe, monkeypatch, options):
    stages = re.search(r"--stages (\d+)", options)
    monkeypatch.setenv("WORLD_SIZE", stages[1] if stages and stages[1] != "2" else "3")
    monkeypatch.setattr(sys, "argv", [str(PP), *options.split()])
    monkeypatch.setattr(recipe, "local_device", lambda: pytest.fail("accepted"))
    with pytest.raises(recipe.Failure, match=re.escape(BAD[options])):
        recipe.train(recipe.parse(recipe.PipelineParallel))


def test_bad_input_is_one_line(tmp_path):
    result = run(["python", PP, "--micro-batches", "7"], tmp_path, env={**ENV, "WORLD_SIZE": "2"})
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("pp_resnet.py: --batch-size 64: doesn't divide by 7 ")


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
