"""Model parallelism: ddp's numbers, each stage on its device, and only where it can work."""

import pytest
import torch
from conftest import run
from strategies import assert_resumes_exactly, assert_same, refusal, train
from torch._subclasses.fake_tensor import FakeTensorMode
from training import ENV, RECIPES, load

MP = RECIPES / "mp_resnet.py"


CASES = [
    "--devices cpu,cpu --micro-batches 1",
    "--devices cpu,cpu --micro-batches 2",
    "--devices cpu,cpu --micro-batches 4",
    "--devices cpu,cpu,cpu --micro-batches 1",
    "--devices cpu,cpu,cpu --micro-batches 2 --accumulate 2",
    "--devices cpu,cpu,cpu --micro-batches 4 --balance 1,5,2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("mp"), MP, 1, {str(k): options for k, options in enumerate(CASES)})


@pytest.mark.parametrize("case", range(len(CASES)), ids=CASES)
def test_equals_ddp(ddp, trained, case):
    got = trained[str(case)]
    assert_same(ddp, got)
    given = "1 blocks on cpu, 5 blocks on cpu, 2 blocks on cpu\ncut by       --balance\n"
    assert (given if "--balance" in CASES[case] else " ms per block\n") in got.said


def test_resumes_exactly(tmp_path):
    assert_resumes_exactly(tmp_path, MP, "--micro-batches", "2")


def move(module, device):
    """Module.to for fake tensors, whose data it can't exchange."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = tensor.detach().to(device)
                    tensors[name] = torch.nn.Parameter(moved) if tensors is part._parameters else moved


def backward(loss):
    """[(parameter, gradient)]: what autograd does, but for the streams that it would ask a GPU for."""
    order, seen, found = [], set(), []

    def visit(node):
        seen.add(node)
        for following, _ in node.next_functions:
            if following and following not in seen:
                visit(following)
        order.append(node)

    visit(loss.grad_fn)
    due = {loss.grad_fn: {0: torch.ones_like(loss)}}
    for node in reversed(order):
        gradients = due.pop(node)
        if hasattr(node, "variable"):
            found.append((node.variable, gradients[0]))
            continue
        given = node(*[gradients.get(k) for k in range(max(gradients) + 1)])
        given = given if isinstance(given, tuple) else (given,)
        for (following, k), gradient in zip(node.next_functions, given, strict=True):
            if following and gradient is not None:
                slots = due.setdefault(following, {})
                slots[k] = slots[k] + gradient if k in slots else gradient
    return found


# Of ResNet-50's 16 blocks, in layers of 3, 4, 6 and 3, the first device has 5, the second 10, the third 1.
PLACES = {"conv1": 0, "bn1": 0, "layer1": 0, "layer2.0": 0, "layer2.1": 0, "layer2.2": 1, "layer2.3": 1, "layer3": 1}
PLACES |= {"layer4.0": 1, "layer4.1": 1, "layer4.2": 2, "fc": 2}


def test_each_stage_computes_on_its_device(monkeypatch):
    """On fake GPUs, which refuse an operation on tensors of two devices: with a copy left out this fails."""
    mp = load(MP)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    devices = [torch.device("cuda", k) for k in range(3)]
    with FakeTensorMode():
        with devices[0]:
            model = mp.torchvision.models.resnet50(num_classes=10)
            images, labels = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
        mp.place(model, devices, [5, 10, 1])
        for name, tensor in model.state_dict().items():
            assert tensor.device.index == next(PLACES[part] for part in PLACES if name.startswith(f"{part}.")), name
        calls = []
        for part in (model.conv1, model.layer2[1], model.layer2[2], model.layer4[1], model.layer4[2], model.fc):
            part.register_forward_hook(
                lambda _, args, output: calls.append((args[0].device.index, output.device.index))
            )
        logits = torch.cat([model(part) for part in images.chunk(2)])
        assert calls == 2 * [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
        loss = mp.sum_loss(logits, labels.to(logits.device), mp.ModelParallel())
        assert loss.device == devices[2]
        gradients = backward(loss)
    assert len(gradients) == len(list(model.parameters()))
    for parameter, gradient in gradients:
        assert gradient.device == parameter.device
    assert {gradient.device for _, gradient in gradients} == set(devices)


def test_balance_cuts_where_the_costliest_stage_costs_least():
    balance = load(MP).balance
    assert balance([1, 1, 1, 1, 1, 1, 1, 1], 4) == (2, 2, 2, 2)
    assert balance([8, 1, 1, 1, 1, 4], 2) == (1, 5)
    assert balance([1, 2, 3, 4, 5, 6, 7], 3) == (4, 2, 1)
    assert balance([3, 1], 2) == (1, 1)


@pytest.mark.parametrize(
    "options, text",
    {
        "--devices gpu0": "gpu0 is none of cpu",
        "--devices cpu,": "an empty name is none of cpu",
        "--devices cuda:0,cuda:1": "cuda:0 is none of cpu",
        "--devices cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu": "9 stages, but resnet18 has 8 blocks",
        "--balance 3,4": "2 numbers that add up to 8 blocks",
        "--balance 4,4,0": "2 numbers that add up to 8 blocks",
        "--balance 8,0": "2 numbers that add up to 8 blocks",
        "--balance -1,9": "2 numbers that add up to 8 blocks",
        "--balance even": "must be auto, or 2 numbers",
        "--micro-batches 0": "--micro-batches 0: must be at least 1",
        "--micro-batches 5": "doesn't divide by 5 (--accumulate 1 x --micro-batches 5); 60 or 65 would",
        "--micro-batches 8 --accumulate 16": "128 would",
    }.items(),
)
def test_refuses(options, text, monkeypatch):
    assert text in refusal(MP, options, monkeypatch)


def test_refuses_several_processes(tmp_path):
    result = run(["python", MP], tmp_path, env={**ENV, "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert result.returncode == 2
    right = "torchrun --nproc_per_node=2 recipes/pp_resnet.py"
    assert result.stderr == f"mp_resnet.py: one process drives all devices, not 4: python {MP}, or {right}\n"
