"""DataParallel: ddp's numbers, replicas of their own, and a word against it."""

import pytest
import torch
from conftest import run
from strategies import assert_resumes_exactly, assert_same, refusal, train
from training import ENV, RECIPES, command, load, scalars

DP = RECIPES / "dp_resnet.py"


def test_equals_ddp(ddp, tmp_path):
    assert_same(ddp, train(tmp_path, DP, 1, {"dp": "--accumulate 2"})["dp"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_two_gpus(ddp, tmp_path, dtype):
    got = train(tmp_path, DP, 1, {"two": f"--devices cuda:0,cuda:1 --dtype {dtype}"})["two"]
    if dtype == "fp64":
        assert_same(ddp, got, 1e-8)  # ddp ran on one GPU
    assert "cuda:0 held" in got.said
    memory = {tag: curve for tag, curve in scalars(tmp_path / "runs/two").items() if tag.startswith("memory/")}
    assert memory.keys() == {"memory/device_0_gib", "memory/device_1_gib"}
    assert memory["memory/device_0_gib"][-1] > memory["memory/device_1_gib"][-1] > (6, 0)


def test_resumes_exactly(tmp_path):
    assert_resumes_exactly(tmp_path, DP)


def test_points_to_ddp(tmp_path):
    done = run([*command(DP), "--max-steps", "1", "--image-size", "16"], tmp_path, env=ENV)
    assert done.stderr.count("\n") == 1
    assert "torchrun --nproc_per_node=1 recipes/ddp_resnet.py" in done.stderr


def replicate(network):
    """DataParallel.replicate on the CPU: modules whose attributes are the network's, and parameters twice as large."""
    copies = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        for name, child in module.named_children():
            copy._modules[name] = copies[child]
        for name, tensor in module._parameters.items():
            setattr(copy, name, None if tensor is None else 2 * tensor.detach())
    return copies[network]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_replica_computes_with_its_own_parameters(dtype):
    """Under autocast too, which must not lead back to the first device's model."""
    dp = load(DP)
    config = dp.Replicated(dtype=dtype, image_size=16)
    model = dp.build_model(config, 10, torch.device("cpu")).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        got = replicate(dp.Replica(model, config))(images)
        before = dp.Replica(model, config)(images)
        for p in model.parameters():
            p.mul_(2)
        assert torch.equal(got, dp.Replica(model, config)(images))
    assert not torch.equal(got, before)
    assert got.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)


@pytest.mark.parametrize(
    "options, text",
    {
        "--devices cpu,cpu": "each can be named once",
        "--devices gpu": "gpu is none of cpu",
        "--devices cuda:0": "cuda:0 is none of cpu",
        "--compile": "use ddp_resnet.py",
    }.items(),
)
def test_refuses(options, text, monkeypatch):
    assert text in refusal(DP, options, monkeypatch)


def test_refuses_several_processes(tmp_path):
    result = run(["python", DP], tmp_path, env={**ENV, "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert result.returncode == 2
    right = "torchrun --nproc_per_node=2 recipes/ddp_resnet.py"
    assert result.stderr == f"dp_resnet.py: one process drives all devices, not 4: python {DP}, or {right}\n"
