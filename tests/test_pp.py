"""The pipeline: the same numbers as ddp on one process, however it is cut, scheduled and interrupted."""

import functools
import itertools
import os
import re
import signal

import pytest
import torch
import torchvision
from conftest import run, start, wait_until
from strategies import EXACT, assert_same, train
from training import DDP, ENV, RECIPES, command, load, status, workers

PP = RECIPES / "pp_resnet.py"
CASES = {
    2: [
        *itertools.product([2], ["gpipe"], [1, 2, 4, 8]),
        *itertools.product([2], ["1f1b", "interleaved"], [2, 4, 8]),
    ],
    3: [
        *itertools.product([3], ["gpipe"], [1, 2, 4, 8]),
        *itertools.product([3], ["1f1b", "interleaved"], [4, 8]),
    ],
    4: [(2, "gpipe", 1), (2, "1f1b", 2), (2, "interleaved", 4)],
}
LONG = "--max-steps 12 --micro-batches 4"
BATCH_NORM = "--norm batch --max-steps 3"


def label(processes, stages, schedule, micro_batches):
    return f"{processes}-{stages}-{schedule}-{micro_batches}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(processes): all that so many have to train, each once."""
    folder = tmp_path_factory.mktemp("pp")

    @functools.cache
    def trained(processes):
        words = "--stages {} --schedule {} --micro-batches {}"
        jobs = {label(processes, *case): words.format(*case) for case in CASES[processes]}
        if processes == 2:
            jobs |= {"long": LONG, "micro-batches": f"{BATCH_NORM} --micro-batches 4 --balance 3,5"}
        return train(folder, PP, processes, jobs)

    return trained


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [label(n, *case) for n in CASES for case in CASES[n]])
def test_same_numbers(ddp, trained, case):
    assert_same(ddp, trained(int(case[0]))[case])


def test_batch_norm_is_that_of_accumulation(trained, tmp_path):
    """Running statistics included; and torchvision's own model takes the weights."""
    accumulated = train(tmp_path, DDP, 1, {"accumulated": f"{BATCH_NORM} --accumulate 4"})["accumulated"]
    micro_batches = trained(2)["micro-batches"]
    assert_same(accumulated, micro_batches)
    torchvision.models.resnet18(num_classes=10).load_state_dict(micro_batches.weights)


def test_bubble(trained):
    said = trained(2)["2-2-gpipe-1"].said
    ideal, measured = re.search(r"bubble: ideal (\S+)%, measured (\S+)% in \d+ steps", said).groups()
    assert float(ideal) == 50  # one stage at a time, whatever the cut
    assert 20 < float(measured) < 80
    assert "3 + 5 blocks" in trained(2)["micro-batches"].said


def test_a_disturbed_run_ends_bit_for_bit_like_an_undisturbed_one(trained, tmp_path):
    options = *EXACT, *LONG.split(), "--name", "long", "--save-every", "2", "--export", "long.pt"
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
    one, other = trained(2)["long"].weights, torch.load(tmp_path / "long.pt", weights_only=True)
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
    monkeypatch.setattr("sys.argv", [str(PP), *options.split()])
    monkeypatch.setattr(recipe, "local_device", lambda: pytest.fail("accepted"))
    with pytest.raises(recipe.Failure, match=re.escape(BAD[options])):
        recipe.train(recipe.parse(recipe.PipelineParallel))


def test_bad_input_is_one_line(tmp_path):
    result = run(["python", PP, "--micro-batches", "7"], tmp_path, env={**ENV, "WORLD_SIZE": "2"})
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("pp_resnet.py: --batch-size 64: doesn't divide by 7 ")
