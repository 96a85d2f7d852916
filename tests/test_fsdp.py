"""Fully sharded: ddp's numbers, 1/N of the parameters on each, and one checkpoint format for all recipes."""

import contextlib
import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from conftest import start, wait_until
from strategies import EXACT, STEPS, assert_resumes_exactly, assert_same, assert_same_weights, refusal, train
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import ENV, RECIPES, load, workers

FSDP = RECIPES / "fsdp_resnet.py"
CPU = torch.device("cpu")


@pytest.mark.parametrize("processes, options", [(1, "--accumulate 3"), (4, "--accumulate 2")])
def test_equals_ddp(ddp, tmp_path, processes, options):
    """Two processes have the golden losses, in test_same_numbers.py."""
    assert_same(ddp, train(tmp_path, FSDP, processes, {"fsdp": options})["fsdp"])


@contextlib.contextmanager
def hybrid(folder, *options):
    """Two nodes, played by two torchruns, of two processes each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meet = f"--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{listener.getsockname()[1]} --local_addr=127.0.0.1"
    with contextlib.ExitStack() as stack:
        jobs = []
        for head in (1, 0):
            torchrun = f"torchrun --nnodes=2 --nproc_per_node=2 {meet} --rdzv_conf=is_host={head}"
            words = [*torchrun.split(), FSDP, *EXACT, "--name", "run", "--hybrid-shard", *options]
            jobs.append(stack.enter_context(start(words, folder, ENV)))
        yield jobs


def test_hybrid_equals_ddp(ddp, tmp_path):
    with hybrid(tmp_path, "--export", "w.pt", *STEPS) as jobs:
        for job in jobs:
            assert job.wait(300).returncode == 0, job.stderr
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert_same_weights(ddp.weights, weights)


def test_a_hung_process_is_named_in_a_hybrid_run(tmp_path):
    """The groups of a mesh have a time limit too."""
    with hybrid(tmp_path, "--timeout", "5") as jobs:

        def said(text):
            return any(text in job.stdout + job.stderr for job in jobs)

        wait_until(lambda: said("step 2/"), 180, "step 2")
        os.kill({rank: pid for job in jobs for rank, pid in workers(job).items()}[3], signal.SIGSTOP)
        wait_until(lambda: said("fsdp_resnet.py: [Rank 0]: Ranks 3 failed"), 40, "the name of who hangs")


def test_resumes_exactly(tmp_path):
    assert_resumes_exactly(tmp_path, FSDP, processes=2)


@contextlib.contextmanager
def processes(count):
    """Be rank 0 of so many processes, of which the others only seem to be there."""
    if count == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype, hybrid", [("fp32", False), ("bf16", False), ("fp32", True)])
def test_each_process_keeps_its_share(monkeypatch, dtype, hybrid):
    """Of 8 processes, or with a replica on each of two nodes, of 4."""
    fsdp = load(FSDP)
    config = fsdp.FullySharded(dtype=dtype, hybrid_shard=hybrid)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    placements, parts = ((Replicate(), Shard(0)), 4) if hybrid else ((Shard(0),), 8)
    with processes(8):
        model = fsdp.build_model(config, 10, CPU)
        whole = {name: p.numel() for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        fsdp.shard_model(model, config, CPU)
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            assert p.placements == placements
            assert p.dtype == torch.float32
            assert p.to_local().numel() == whole[name] / parts or name.startswith("fc.")  # of 10 classes
        assert {name: id(buffer) for name, buffer in model.named_buffers()} == {n: id(b) for n, b in buffers.items()}
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        blocks = {f"layer{k}.{j}" for k in (1, 2, 3, 4) for j in (0, 1)}
        norms = {name for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
        assert units.keys() == {"", *blocks, *(norms if dtype == "bf16" else ())}
        for unit in units.values():  # gradients are summed in fp32, and no public attribute tells
            policy = unit._get_fsdp_state()._mp_policy  # without a dtype to reduce in, it is that of the parameters
            assert policy.reduce_dtype == (torch.float32 if policy.param_dtype else None)


def gradients(recipe, config, shard):
    """Of one backward pass, with the logits."""
    model = recipe.build_model(config, 10, CPU)
    if shard:
        recipe.shard_model(model, config, CPU)
    torch.manual_seed(1)
    with recipe.autocast(config, CPU):
        logits = model(torch.rand(4, 3, 32, 32))
    recipe.sum_loss(logits, torch.arange(4), config).backward()
    found = {name: p.grad.full_tensor() if shard else p.grad for name, p in model.named_parameters()}
    return logits, found, dict(model.named_buffers())


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_half_precision_is_that_of_ddp(norm):
    fsdp = load(FSDP)
    config = fsdp.FullySharded(dtype="bf16", norm=norm)
    with processes(1):
        (logits, one, buffers), (other_logits, other, other_buffers) = (
            gradients(fsdp, config, s) for s in (False, True)
        )
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, other_logits)
    for mine, its in ((one, other), (buffers, other_buffers)):
        assert mine.keys() == its.keys()
        assert not [name for name in mine if not torch.equal(mine[name], its[name])]


@pytest.mark.parametrize(
    "world, local, text",
    [(1, 1, "there is one node"), (4, 4, "there is one node"), (4, 3, "nodes differ in processes")],
)
def test_refuses_hybrid(world, local, text, monkeypatch):
    environment = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}
    assert text in refusal(FSDP, "--hybrid-shard", monkeypatch, **environment)
