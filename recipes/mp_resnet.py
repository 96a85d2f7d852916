"""Train a ResNet by model parallelism: one process, each device with the parameters of a few blocks.

The model is cut into stages, one per device; activations are copied to the next device where the stage ends,
and their gradients back. It needs neither torchrun nor a change of the model, and trains what doesn't fit one
device. With `--micro-batches 1`, the naive way, one device works while the others wait. Cut the batch into
micro-batches and their work overlaps: Python only launches the kernels, so that a device begins with the
next micro-batch while the one after it works on the last. The bound for M micro-batches on N equal devices is
M / (M + N - 1) of the time busy; ones too small for a device cost more than they gain. All activations of a
step live until the backward pass. Over more than one node, or where one Python process can't launch fast
enough, take pp_resnet.py; where the model fits one device, ddp_resnet.py is faster. On the CPU an operation
waits for the one before, so that nothing overlaps: with two stages and two threads, naive is 1.74 times one core and
four micro-batches 1.51 times, where DDP has 1.92 (ResNet-18, 64x64, batch 128, by benchmarks/strategies.py).

    python recipes/mp_resnet.py                                    # a stage on each GPU of this machine
    python recipes/mp_resnet.py --devices cuda:0,cuda:1 --micro-batches 1
    ./launch.sh recipes/mp_resnet.py --data /data/imagenet --arch resnet152 --balance 14,18,18

With `--norm batch` each micro-batch is normalized by itself and moves the running statistics: results differ a
little with `--micro-batches` and `--accumulate`. With `--norm group` they don't, nor do they with the cut.
"""
# Processes: one drives all devices.

import collections
import contextlib
import copy
import ctypes
import functools
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import tyro
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomResizedCrop
from torchvision.utils import make_grid
from tqdm import tqdm

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
RESNETS = [name for name in torchvision.models.list_models(torchvision.models) if "resne" in name]


@dataclass
class Training:
    """What is computed. A run goes on only with the values that it began with."""

    arch: Literal[tuple(RESNETS)] = "resnet18"
    data: str = "digits"  # digits, synthetic, or a directory with train/CLASS/* and val/CLASS/*
    image_size: int = 0  # height and width in pixels; 0: 32 for digits, else 224
    epochs: int = 12
    batch_size: int = 64  # images per optimizer step, over all devices and accumulation
    lr: float = 0.05  # peak learning rate of the global batch, never rescaled
    warmup_epochs: float = 1.0  # linear from 0, then a cosine to 0, by optimizer step
    momentum: float = 0.9
    weight_decay: float = 5e-4  # not of norms and biases
    label_smoothing: float = 0.0
    clip_grad_norm: float = 0.0  # 0: off
    norm: Literal["batch", "group", "sync"] = "batch"  # statistics per process, none, over all processes
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"  # bf16, fp16: autocast; fp16 scales the loss
    on_bad_image: Literal["stop", "skip"] = "stop"  # a file that can't be decoded ends the run, or is left out
    seed: int = 0  # of weights, sample order and augmentation


@dataclass
class Config(Training):
    """How it is computed. May change whenever a run goes on."""

    accumulate: int = 1  # micro-batches per optimizer step, when the batch doesn't fit into memory
    workers: int | None = None  # loader processes per rank; default: this rank's share of the cores, less one
    channels_last: bool = False  # the memory format of tensor cores: use it with bf16 and fp16
    compile: bool = False
    deterministic: bool = False  # bit-identical reruns on CUDA, slower
    eval_every: int = 1  # epochs; the end of the run is always evaluated
    save_every: int = 0  # steps; 0: by time alone
    save_every_seconds: float = 600.0  # 0: by steps alone
    keep: int = 2  # checkpoints
    log_every: int = 10  # steps
    max_steps: int = 0  # end before the last epoch, on the same schedule; 0: don't
    name: str = ""  # the run is runs/NAME, and goes on if it exists; default: Slurm's job id, else the time
    resume: str = "auto"  # or the checkpoint with which a new run begins
    export: str = ""  # file for the final weights: a state dict under torchvision's names
    profile: bool = False  # write a Chrome trace of three steps into the run directory
    timeout: float = 600.0  # seconds to wait for another process before giving up


@dataclass
class ModelParallel(Config):
    """How the model is cut."""

    devices: str = ""  # of the stages, such as cuda:0,cuda:1; default: all visible GPUs, without any cpu,cpu
    micro_batches: int = 4  # per accumulated batch, to overlap the work of the devices; 1: naive
    balance: str = "auto"  # blocks per stage, such as 5,3; auto: cut by measured time


class Failure(Exception):
    """Ends the program with one line on standard error. Exit code 2 stands for bad input."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def parse(config_type: type[Config]) -> Config:
    """Read the command line. Raises Failure with tyro's reason, taken out of its box."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            config = tyro.cli(config_type, description=__doc__)
    except SystemExit as error:
        if not error.code:
            raise
        reason = box.getvalue().partition("│ ───")[0].splitlines()[1:]
        raise Failure(" ".join(line.strip("│ ") for line in reason)) from None
    config.image_size = config.image_size or (32 if config.data == "digits" else 224)
    for field in fields(config):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        least = 1 if field.name == "timeout" or field.type is int and field.default else 0
        most = 1 if field.name in ("momentum", "label_smoothing") else sys.float_info.max
        if isinstance(value, int | float) and not least <= value <= most:
            raise Failure(f"--{option} {value}: must be at least {least}" + ", at most 1" * (most == 1))
    if config.export and not Path(config.export).absolute().parent.is_dir():
        raise Failure(f"--export {config.export}: its directory doesn't exist")
    for option, value in (("norm", "sync"), ("dtype", "fp16")):
        if getattr(config, option) == value and not torch.cuda.is_available():
            raise Failure(f"--{option} {value}: needs CUDA, and there is no GPU here")
    return config


def check_divides(batch_size: int, parts: int, meaning: str) -> None:
    """Raises Failure, naming the nearest sizes that fit, unless the batch divides into equal parts."""
    if batch_size % parts:
        below = batch_size - batch_size % parts
        fit = f"{below} or {below + parts}" if below else f"{parts}"
        raise Failure(f"--batch-size {batch_size}: doesn't divide by {parts} ({meaning}); {fit} would")


# ---- Processes


def check_alone(world: int, recipe: str) -> None:
    """Raises Failure, naming the recipe for several processes, if torchrun has started more than one."""
    if world > 1:
        other = f"torchrun --nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', world)} recipes/{recipe}"
        raise Failure(f"one process drives all devices, not {world}: python {sys.argv[0]}, or {other}")


def find_devices(names: str, default: str) -> list[torch.device]:
    """The devices of these names, else all visible GPUs, else the default. Raises Failure for unknown ones."""
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    found = names.split(",") if names else gpus or default.split(",")
    for name in found:
        if name not in ("cpu", *gpus):
            raise Failure(f"--devices {names}: {name or 'an empty name'} is none of {', '.join(('cpu', *gpus))}")
    if "cpu" in found and set(found) != {"cpu"}:
        raise Failure(f"--devices {names}: either GPUs or the CPU")
    return [torch.device(name) for name in found]


def setup_distributed(config: Config, device: torch.device) -> None:
    """Join the process group that torchrun describes, or be a world of one without torchrun."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS can't be deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    timeout, (store, rank, world) = timedelta(seconds=config.timeout), (dist.HashStore(), 0, 1)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun 2.14 keeps this store over a restart, and in it the addresses of processes that are gone.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    where = {"store": store, "rank": rank, "world_size": world}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL's watchdog ends a process without a word about who is missing: Agreement gives up first.
        dist.init_process_group("nccl", timeout=2 * timeout, device_id=device, **where)
    else:
        dist.init_process_group("gloo", timeout=timeout, **where)


class Agreement:
    """Makes all ranks stop, or save, after the same step. A signal only raises a flag; every step reads what
    the ranks raised a step ago and starts to reduce the flags of now, so that no step waits."""

    def __init__(self, config: Config):
        self.config, timeout = config, timedelta(seconds=config.timeout)
        self.group = self.roll_call = dist.new_group(backend="gloo", timeout=timeout)  # never waits for a GPU
        self.meet(timeout)
        # To ask who is missing when a wait was in vain. The other ranks wait for rank 0 as long as the group allows.
        self.roll_call = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
        self.signal, self.stop, self.save, self.saved_at, self.work = 0, 0, False, time.monotonic(), None
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C doesn't wait for the save

    def meet(self, timeout: timedelta) -> None:
        """Wait for all ranks. Raises Failure, which on rank 0 names those that are missing."""
        try:
            dist.monitored_barrier(self.roll_call, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise Failure(f"lost touch with other processes: {error}", 1) from None

    def exchange(self, unreadable: bool) -> None:
        """Read the last flags and send new ones; one of them says that this rank met an unreadable image."""
        self.settle()
        due = dist.get_rank() == 0 and 0 < self.config.save_every_seconds < time.monotonic() - self.saved_at
        self.saved_at = time.monotonic() if due else self.saved_at
        fatal = unreadable and self.config.on_bad_image == "stop"
        self.flags = torch.tensor([self.signal, fatal, due], dtype=torch.int32)
        self.work = dist.all_reduce(self.flags, dist.ReduceOp.MAX, self.group, async_op=True)

    def settle(self) -> None:
        """Read the flags on their way. Raises Failure if a rank met an image that ends the run."""
        if self.work:
            self.work.wait()
            self.work, (stop, fatal, due) = None, self.flags.tolist()
            self.stop, self.save = max(self.stop, stop), self.save or bool(due)
            if fatal:
                raise Failure("")  # the loader worker that met it has said so

    def on_rank_0(self, function, *arguments):
        """Call a function on rank 0 and give its result, or its Failure, to every rank."""
        answer = [None, None]
        if dist.get_rank() == 0:
            try:
                answer[0] = function(*arguments)
            except Failure as failure:
                answer[1] = failure
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1]:
            raise answer[1]
        return answer[0]


# ---- Data


def build_data(config: Config, agreement: Agreement) -> tuple[list[str], "Images", "Images"]:
    """Class names, training and validation images."""
    if config.data == "synthetic":
        classes, counts = [str(k) for k in range(1000)], (100_000, 1_000)
        splits = [(np.arange(count), np.arange(count) % 1000) for count in counts]
    elif config.data == "digits":  # 1797 handwritten digits of 8x8 pixels, of which every fifth validates
        # Read from where scikit-learn has them, as its import takes a second.
        [package] = importlib.util.find_spec("sklearn").submodule_search_locations
        table = np.loadtxt(Path(package, "datasets/data/digits.csv.gz"), delimiter=",")
        pixels = np.repeat(np.uint8(table[:, :64] * 255 / 16).reshape(-1, 8, 8, 1), 3, axis=3)
        val = np.arange(len(pixels)) % 5 == 4
        classes, splits = list("0123456789"), [(pixels[part], table[part, 64].astype(int)) for part in (~val, val)]
    else:
        classes, splits = agreement.on_rank_0(scan, config.data)
    return classes, Images(*splits[0], config, train=True), Images(*splits[1], config, train=False)


def scan(root: str) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]]]:
    """Class names, and paths (bytes) and labels of train and val. Arrays, since loader workers copy a list of
    a million strings page by page as they read it. Raises Failure if the directory is laid out otherwise."""
    try:
        train, val = splits = [ImageFolder(Path(root, split)) for split in ("train", "val")]
    except OSError as error:
        raise Failure(f"--data {root}: {error}") from None
    if odd := set(train.classes) ^ set(val.classes):
        odd = ", ".join(sorted(odd)[:5])
        raise Failure(f"--data {root}: train and val must have the same classes; only one has {odd}")
    return train.classes, [(np.array([os.fsencode(p) for p, _ in s.samples]), np.array(s.targets)) for s in splits]


class Images:
    """A list of (epoch, index) gives a batch: uint8 [n, 3, size, size], labels [n], how many can't be read.

    Crop and flip are drawn from (seed, epoch, index), so that an image looks the same whoever loads it. One
    that can't be read has the label -1, which loss and accuracy ignore.
    """

    def __init__(self, source: np.ndarray, labels: np.ndarray, config: Training, train: bool):
        self.source, self.labels, self.train = source, torch.from_numpy(labels), train
        self.size, self.seed, self.digits = config.image_size, config.seed, config.data == "digits"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor, int]:
        images = torch.zeros(len(keys), 3, self.size, self.size, dtype=torch.uint8)
        labels = self.labels[[index for _, index in keys]]
        for slot, (epoch, index) in enumerate(keys):
            draw = np.random.SeedSequence((self.seed, epoch, index)).generate_state(1)
            torch.default_generator.manual_seed(int(draw[0]))
            try:
                images[slot] = self.load(self.source[index])
            except Exception as error:  # a broken file makes PIL raise almost any type
                labels[slot], reason = -1, str(error).partition(" <_io")[0]
                print(f"cannot read {os.fsdecode(self.source[index])}: {reason}", file=sys.stderr, flush=True)
        return images, labels, int((labels < 0).sum())

    def load(self, source: np.ndarray | bytes) -> Tensor:
        """Read, crop and resize. For training a JPEG is decoded at a half, a quarter or an eighth of its size if
        that is enough: it spares most of the work, and moves the crop by half a pixel of that size at most."""
        picture, scale = Image.fromarray(source) if self.digits else Image.open(os.fsdecode(source)), 1
        if self.train:
            area = (0.6 if self.digits else 0.08, 1)
            box = RandomResizedCrop.get_params(picture, area, (3 / 4, 4 / 3))  # top, left, height, width
            enough = [math.ceil(edge * self.size / min(box[2:])) for edge in picture.size]
            full, draft = picture.width, picture.draft(None, enough)  # nothing unless it is a JPEG
            scale = draft[1][2] / full if draft else 1
        else:
            side = round(min(picture.size) * (1 if self.digits else 0.875)) or 1
            box = (picture.height - side) // 2, (picture.width - side) // 2, side, side
        top, left, height, width = (round(edge * scale) for edge in box)
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
        part = pixels[:, top : top + max(height, 1), left : left + max(width, 1)]
        image = F.interpolate(part[None], (self.size, self.size), mode="bilinear", antialias=True)[0]
        return image.flip(2) if self.train and not self.digits and torch.rand(()) < 0.5 else image


def train_batches(config: Config, images: int, start: int, stop: int, replica: int, replicas: int):
    """Yields one replica's micro-batches of the steps from start to stop, as lists of (epoch, index).

    The global batches of an epoch are slices of a permutation that depends on (seed, epoch) alone; what
    doesn't fill a last batch is left out of that epoch.
    """
    steps_per_epoch = images // config.batch_size
    for epoch, steps in itertools.groupby(range(start, stop), lambda step: step // steps_per_epoch):
        order = np.random.default_rng((config.seed, epoch)).permutation(images)
        for step in steps:
            batch = order[step % steps_per_epoch * config.batch_size :][: config.batch_size]
            for micro_batch in batch.reshape(config.accumulate, replicas, -1)[:, replica]:
                yield [(epoch, index) for index in micro_batch.tolist()]


def eval_batches(config: Config, images: int, replica: int, replicas: int) -> list[list[tuple[int, int]]]:
    """Every image on one replica, in equally many batches on each: the last of them may be empty."""
    edges = range(0, images, config.batch_size)
    return [[(0, k) for k in range(images)[edge : edge + config.batch_size][replica::replicas]] for edge in edges]


def build_loader(images: Images, batches, config: Config, device: torch.device):
    if config.data == "synthetic":  # noise made once, on the device: the speed is that of compute alone
        generator, size = torch.Generator().manual_seed(config.seed), (256, 3, images.size, images.size)
        noise = torch.randint(256, size, dtype=torch.uint8, generator=generator).to(device)
        indices = (torch.tensor([index for _, index in batch], dtype=torch.int64) for batch in batches)
        return ((noise[index % 256], images.labels[index], 0) for index in indices)
    workers = config.workers
    if workers is None:
        workers = max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1, 0)
    return DataLoader(
        images,
        batch_size=None,  # the sampler gives whole batches, and Images loads them
        sampler=batches,
        num_workers=workers,
        worker_init_fn=start_worker,
        timeout=config.timeout if workers else 0,
        pin_memory=device.type == "cuda",
    )


def start_worker(_worker: int) -> None:
    """A job's signals reach the loader workers too; dying, they would take the last save with them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Leave no orphan when the parent is killed: prctl(PR_SET_PDEATHSIG), on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---- Model


def build_model(config: Config, classes: int, device: torch.device) -> nn.Module:
    torch.manual_seed(config.seed)
    norm = (lambda channels: nn.GroupNorm(32, channels)) if config.norm == "group" else None
    model = torchvision.models.get_model(config.arch, num_classes=classes, norm_layer=norm)
    if config.norm == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model.to(device, torch.float64 if config.dtype == "fp64" else torch.float32)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Where it is on, torch computes in half precision what is safe in it."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.dtype)
    return torch.autocast(device.type, half, enabled=half is not None)


def blocks_of(model: nn.Module) -> list[nn.Sequential]:
    """The residual blocks in their order; the stem belongs to the first, the head to the last."""
    layers = model.layer1, model.layer2, model.layer3, model.layer4
    blocks = [[block] for layer in layers for block in layer]
    blocks[0] = [model.conv1, model.bn1, model.relu, model.maxpool, *blocks[0]]
    blocks[-1] += [model.avgpool, nn.Flatten(), model.fc]
    return [nn.Sequential(*block) for block in blocks]


def time_blocks(blocks: list[nn.Sequential], images: Tensor) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Seconds of the forward and of the backward pass of each block with these images, and what it gives."""
    seconds, outputs, inputs = [], [], images

    def now() -> float:
        if images.device.type == "cuda":
            torch.cuda.synchronize(images.device)
        return time.perf_counter()

    for block in blocks:
        passes = []
        for _ in range(3):  # the first of them warms up
            inputs = inputs.detach().requires_grad_(block is not blocks[0])
            began = now()
            output = block(inputs)
            middle = now()
            output.backward(torch.ones_like(output))
            passes.append((middle - began, now() - middle))
        block.zero_grad()
        seconds.append(tuple(map(min, *passes[1:])))
        outputs.append(torch.empty_like(output, device="meta", memory_format=torch.contiguous_format))
        inputs = output
    return seconds, outputs


def balance(costs: list[float], stages: int) -> tuple[int, ...]:
    """Blocks per stage, such that the costliest stage costs least."""

    @functools.cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(costs[start:]), (len(costs) - start,)
        rest = {cut: best(cut, stages - 1) for cut in range(start + 1, len(costs) - stages + 2)}
        return min((max(sum(costs[start:cut]), cost), (cut - start, *sizes)) for cut, (cost, sizes) in rest.items())

    return best(0, stages)[1]


def given_sizes(config: ModelParallel, stages: int) -> list[int]:
    """Blocks per stage as --balance gives them, [] for auto. Raises Failure if the model can't be cut so."""
    with torch.device("meta"):
        blocks = len(blocks_of(torchvision.models.get_model(config.arch)))
    if stages > blocks:
        raise Failure(f"--devices {config.devices}: {stages} stages, but {config.arch} has {blocks} blocks")
    if config.balance == "auto":
        return []
    sizes = [int(size) if size.isdecimal() else 0 for size in config.balance.split(",")]
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != blocks:
        raise Failure(f"--balance {config.balance}: must be auto, or {stages} numbers that add up to {blocks} blocks")
    return sizes


def time_copies(model: nn.Module, config: ModelParallel, device: torch.device) -> list[float]:
    """Seconds of a micro-batch, forward and backward, in each block. Of a copy, as running statistics move."""
    share = config.batch_size // config.accumulate // config.micro_batches
    images = torch.zeros(share, 3, config.image_size, config.image_size, dtype=torch.uint8)
    with autocast(config, device):
        seconds, _ = time_blocks(blocks_of(copy.deepcopy(model)), to_input(images, config, device))
    return [sum(passes) for passes in seconds]


def place(model: nn.Module, devices: list[torch.device], sizes: list[int]) -> None:
    """Move each stage's blocks to its device and let its first module copy its input there. torchvision's forward
    and names stay. A copy waits for its input, and the next stage for the copy, on streams: Python waits for none.
    """
    blocks = iter(blocks_of(model))
    for device, size in zip(devices, sizes, strict=True):
        stage = list(itertools.islice(blocks, size))
        stage[0][0].register_forward_pre_hook(lambda _, args, device=device: args[0].to(device, non_blocking=True))
        for block in stage:
            block.to(device)


def to_input(images: Tensor, config: Config, device: torch.device) -> Tensor:
    """Normalize on the device: a quarter of the bytes to copy, and none of the loader's time."""
    images = images.to(device, non_blocking=True).to(torch.float64 if config.dtype == "fp64" else torch.float32)
    images = images.sub_(115).div_(58)  # mean and standard deviation of ImageNet
    return images.contiguous(memory_format=torch.channels_last) if config.channels_last else images


def sum_loss(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    logits = logits if config.dtype == "fp64" else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum", label_smoothing=config.label_smoothing)


def build_optimizer(config: Config, model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # biases, and weights of norms
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors}]
    return torch.optim.SGD(groups, config.lr, config.momentum, fused=fused, foreach=not fused)


def learning_rate(config: Config, epoch: float) -> float:
    """A linear warm-up, then half a cosine (Loshchilov and Hutter, 2017)."""
    if epoch < config.warmup_epochs:
        return config.lr * epoch / config.warmup_epochs
    done = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * (1 + math.cos(math.pi * done)) / 2


def optimizer_step(config: Config, model, optimizer, scaler, rate: float, total_norm=nn.utils.get_total_norm) -> Tensor:
    """Unscale, clip, step, and clear the gradients; returns their norm before clipping."""
    scaler.unscale_(optimizer)
    norm = total_norm([p.grad for p in model.parameters()])
    if config.clip_grad_norm:
        nn.utils.clip_grads_with_norm_(model.parameters(), config.clip_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


# ---- Run directory


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> dict:
    """The whole state in CPU memory, under torchvision's names: the same format for every strategy."""
    if dist.get_rank() != 0:
        return {}
    momentum = {name: optimizer.state[p].get("momentum_buffer") for name, p in model.named_parameters()}
    return {
        "model": {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()},
        "momentum": {name: tensor.to("cpu", copy=True) for name, tensor in momentum.items() if tensor is not None},
        "scaler": scaler.state_dict(),
    }


def restore(state: dict, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    model.load_state_dict(state["model"])
    scaler.load_state_dict(state["scaler"])
    for name, p in model.named_parameters():
        if name in state["momentum"]:
            optimizer.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(state["momentum"][name])
    state.clear()  # it would stay in memory


def write_file(path: Path, write) -> None:
    """Let write(file) fill the file. A kill or a power cut leaves the old one or the new one, whole."""
    with open(f"{path}.tmp", "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def write_json(path: Path, value: dict) -> None:
    write_file(path, lambda file: file.write(json.dumps(value, indent=1).encode() + b"\n"))


def open_run(config: Config) -> tuple[Path, dict]:
    """The run directory, and the newest checkpoint in it that loads ({} for a new run).

    Raises Failure if it can't be written to, or holds a run with other values of Training.
    """
    # By default the start of torchrun names the run: a worker that torchrun restarts must find it again.
    starter = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None)
    started = f"{datetime.fromtimestamp(starter.create_time()):%Y%m%d-%H%M%S}-{starter.pid}"
    run, state, problems = Path("runs", config.name or os.environ.get("SLURM_JOB_ID") or started), {}, []
    paths = sorted(run.glob("step_*.pt"), reverse=True)
    if not paths and config.resume != "auto":
        paths = [Path(config.resume)]
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            pairs = {f.name: (state["config"][f.name], getattr(config, f.name)) for f in fields(Training)}
        except Exception as error:  # a damaged file makes torch.load raise almost any type
            problems.append(f"cannot load {path}: {str(error).splitlines()[0]}")
            continue
        changed = [f"--{k.replace('_', '-')} {old}, not {new}" for k, (old, new) in pairs.items() if old != new]
        if changed:
            raise Failure(f"{path} is of a run with {'; '.join(changed)}: change it back or take another --name")
        break
    else:
        if problems:
            raise Failure(problems[0])
    for problem in problems:
        print(f"{problem}; going on from {path}", file=sys.stderr)
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / "config.json", vars(config))
    except OSError as error:
        raise Failure(f"cannot write to the run directory {run}: {error.strerror}") from None
    return run, state


class Run:
    """Where a run stands, and what it leaves: console, TensorBoard events, checkpoints, status.json.

    All ranks call its methods alike; rank 0 writes.
    """

    def __init__(self, config: Config, agreement: Agreement, device: torch.device, images: int):
        self.config, self.agreement, self.leader = config, agreement, dist.get_rank() == 0
        self.device, self.devices = device, [device]  # of the model's input; whose peak memory is logged
        self.steps_per_epoch = images // config.batch_size
        if not self.steps_per_epoch:
            raise Failure(f"--batch-size {config.batch_size}: there are only {images} training images")
        self.path, self.state = agreement.on_rank_0(open_run, config)
        self.step = self.first = self.state.get("step", 0)
        self.last = max(self.step, min(config.epochs * self.steps_per_epoch, config.max_steps or math.inf))
        self.evaluated, self.result = self.state.get("evaluated", 0), self.state.get("result", "")
        self.saved = self.step, self.evaluated
        self.rows, self.pending, self.memory = self.state.get("rows", []), [], [0.0]
        self.began, self.spent = time.perf_counter(), collections.Counter()
        self.logged = self.step, self.began, self.spent.copy()
        self.saver, self.saving = ThreadPoolExecutor(1), None
        self.digits = 16 if config.dtype == "fp64" else 5

    @contextlib.contextmanager
    def logging(self, facts: dict[str, str]):
        """Say what runs where, and keep events and status.json open until the run ends, one way or another."""
        self.say("\n".join(f"{name:13}{fact}" for name, fact in facts.items()))
        if self.leader:
            new = self.step == 0 or not any(self.path.glob("events.*"))
            # purge_step hides what a killed run logged beyond the step where this one begins.
            self.writer = SummaryWriter(self.path, purge_step=self.step + 1 if self.step else 0)
            self.bar = tqdm(initial=self.step, total=self.last, unit="step", disable=None)
            options = {name: value for name, value in vars(self.config).items() if value is not None}
            if new:
                self.writer.add_text("config", "\n".join(f"    {name}: {options[name]}" for name in options), 0)
                for summary in hparams(options, {"eval/top1": 0, "eval/loss": 0}):
                    self.writer.file_writer.add_summary(summary, 0)  # add_hparams would make a run of its own
        self.status("running")
        steps = schedule(skip_first=2, wait=0, warmup=1, active=3, repeat=1)
        trace = contextlib.nullcontext()
        if self.leader and self.config.profile:
            trace = profile(schedule=steps, on_trace_ready=tensorboard_trace_handler(self.path))
        try:
            with trace as self.profiler:
                yield
        except BaseException as error:
            self.status("failed", str(error))
            if re.search("(?i)timed out|timeout|by peer", str(error)):  # gloo has no type for it
                self.agreement.meet(timedelta(seconds=5))
            raise
        finally:
            if self.leader:
                self.bar.close()
                self.writer.close()
            self.saver.shutdown()

    def say(self, text: str) -> None:
        if self.leader:
            tqdm.write(text)
            sys.stdout.flush()

    def status(self, status: str, reason: str = "") -> None:
        """For job scripts, as torchrun doesn't pass on the exit code of a recipe."""
        facts = {"status": status, "step": self.step, "started_at_step": self.first, "reason": reason}
        if self.leader:
            write_json(self.path / "status.json", facts)

    @contextlib.contextmanager
    def timed(self, what: str):
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def fetch(self, batches) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of the next step; `agreement.stop` then says whether it is still to be done."""
        with self.timed("data"):
            micro_batches = list(itertools.islice(batches, self.config.accumulate))
        if self.leader and not self.step:
            self.writer.add_image("train/input", make_grid(micro_batches[0][0][:64]), 0)
        self.agreement.exchange(any(unreadable for *_, unreadable in micro_batches))
        return [(images, labels) for images, labels, _ in micro_batches]

    def advance(self, rate: float, sums: Tensor, norm: Tensor) -> None:
        """Count a step. This rank's sums of loss, hits and images, and the gradient norm, stay on the device
        until the next log line or checkpoint: to read them in every step would stall it."""
        self.step += 1
        self.pending.append(torch.cat([sums, norm[None] / dist.get_world_size()]).double())
        if self.leader:
            self.bar.update()
        if self.profiler:
            self.profiler.step()
        if self.step % self.config.log_every == 0 or self.step == self.last:
            self.log(rate)

    def reduce(self) -> list[list[float]]:
        """The rows since the last log, summed over ranks. In float64 a sum of few float32 is exact: it doesn't
        show where a restart cut the interval. Raises Failure where a loss is not finite."""
        if self.pending:
            table = torch.stack(self.pending)
            dist.all_reduce(table)
            self.rows, self.pending = self.rows + table.tolist(), []
            for back, (loss, *_, norm) in enumerate(reversed(table.tolist())):
                if not math.isfinite(loss) or not (math.isfinite(norm) or self.config.dtype == "fp16"):
                    what = f"loss {loss:.4g}, gradient norm {norm:.4g} in step {self.step - back}"
                    raise Failure(f"{what}; the newest checkpoint is of step {self.saved[0]}; try a lower --lr", 3)
        return self.rows

    def log(self, rate: float) -> None:
        loss, hits, images, norm = (sum(column) for column in zip(*self.reduce(), strict=True))
        count, (step, began, before), now = len(self.rows), self.logged, time.perf_counter()
        self.rows, self.logged, spent = [], (self.step, now, self.spent.copy()), self.spent - before
        elapsed = now - began - spent["evaluation"] - spent["checkpoint"]
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = [torch.cuda.max_memory_allocated(d) if d.type == "cuda" else host for d in self.devices]
        ranks = torch.zeros(dist.get_world_size(), 1 + len(peaks), dtype=torch.float64, device=self.device)
        ranks[dist.get_rank()] = torch.tensor([spent["data"] + spent["forward"], *(peak / 2**30 for peak in peaks)])
        dist.all_reduce(ranks)
        own, self.memory = ranks[:, 0].tolist(), ranks[:, 1:].flatten().tolist()
        scalars = {
            "train/loss": loss / max(images, 1),
            "train/accuracy": hits / max(images, 1),
            "train/learning_rate": rate,
            "train/gradient_norm": norm / count,
            "speed/images_per_second": (self.step - step) * self.config.batch_size / elapsed,
            "speed/step_ms": 1000 * elapsed / (self.step - step),
            "speed/data_wait_fraction": spent["data"] / elapsed,
            "speed/slowest_over_fastest_rank": max(own) / min(own),
        }
        self.scalars({**scalars, **{f"memory/device_{k}_gib": gib for k, gib in enumerate(self.memory)}})
        line = "loss {train/loss:.{d}g}  accuracy {train/accuracy:.4f}  {speed/images_per_second:.0f} images/s"
        if self.leader:
            self.bar.set_postfix_str(line.format(d=self.digits, **scalars))
            if self.bar.disable:
                self.say(f"step {self.step}/{self.last}  {line.format(d=self.digits, **scalars)}")

    def scalars(self, values: dict[str, float]) -> None:
        """In float32, as TensorBoard's data server shows no float64; the console has all digits of an fp64 run."""
        for tag, value in values.items() if self.leader else ():
            self.writer.add_scalar(tag, value, self.step)

    def log_evaluation(self, loss: float, top1: int, top5: int, images: int, wrong: list[Tensor]) -> None:
        self.evaluated, self.result = self.step, f"top-1 {100 * top1 / images:.2f} % ({top1:.0f}/{images:.0f})"
        self.say(f"step {self.step}/{self.last}  evaluation: loss {loss / images:.{self.digits}g}, {self.result}")
        self.scalars({"eval/loss": loss / images, "eval/top1": top1 / images, "eval/top5": top5 / images})
        if wrong:
            self.writer.add_image("eval/wrong", make_grid(wrong, nrow=4), self.step)

    def save(self, state: dict) -> None:
        """Write a checkpoint from a thread, while training goes on."""
        self.agreement.settle()
        facts = {"step": self.step, "evaluated": self.evaluated, "result": self.result, "rows": self.reduce()}
        self.saved, self.agreement.save = (self.step, self.evaluated), False
        if self.leader:
            self.writer.flush()
            if self.saving:
                self.saving.result()
            self.saving = self.saver.submit(self.write_checkpoint, {**state, **facts, "config": vars(self.config)})

    def write_checkpoint(self, state: dict) -> None:
        write_file(self.path / f"step_{state['step']:08d}.pt", lambda file: torch.save(state, file))
        written = sorted(self.path.glob("step_*.pt"), key=lambda path: path.stat().st_mtime_ns)
        for old in written[: -self.config.keep]:
            old.unlink()

    def finish(self, state: dict) -> None:
        """Write the last checkpoint, wait until it is safe, and say how the run ended."""
        with self.timed("checkpoint"):
            if self.saved != (self.step, self.evaluated):
                self.save(state)
            if self.saving:
                self.saving.result()
        if not self.evaluated == self.step == self.last:
            reason = signal.Signals(self.agreement.stop).name
            self.status("stopped", reason)
            self.say(f"stopped by {reason} after step {self.step}; --name {self.path.name} goes on from there")
            return
        self.export(state)
        self.status("finished")
        total = time.perf_counter() - self.began
        parts = {what: self.spent[what] for what in ("data", "evaluation", "checkpoint")}
        parts["step"] = total - sum(parts.values())
        self.say(f"finished after step {self.step}: {self.result}; at most {max(self.memory):.2f} GiB per device")
        self.say(f"{total:.1f} s: " + ", ".join(f"{what} {100 * t / total:.1f} %" for what, t in parts.items()))

    def export(self, state: dict) -> None:
        if self.leader and self.config.export:
            write_file(Path(self.config.export), lambda file: torch.save(state["model"], file))


# ---- Training


@torch.no_grad()
def evaluate(model: nn.Module, batches, classes: list[str], run: Run) -> None:
    """Loss and accuracy over every validation image once, unless the run is told to stop meanwhile."""
    sums, wrong = torch.zeros(4, dtype=torch.float64, device=run.device), []
    model.eval()
    for images, labels, unreadable in batches:
        run.agreement.exchange(unreadable > 0)
        if run.agreement.stop:
            break
        with autocast(run.config, run.device):
            logits = model(to_input(images, run.config, run.device))
        labels = labels.to(logits.device, non_blocking=True)
        best = logits.topk(min(5, len(classes))).indices
        hits, known = best == labels[:, None], labels >= 0
        loss = sum_loss(logits, labels, run.config)
        sums += torch.stack([loss, hits[:, 0].sum(), hits.sum(), known.sum()]).to(run.device)
        if run.leader and len(wrong) < 16:
            for k in (known & ~hits[:, 0]).nonzero().flatten().tolist()[: 16 - len(wrong)]:
                wrong.append(caption(images[k], f"{classes[labels[k]]} taken for {classes[best[k, 0]]}"))
    model.train()
    run.agreement.settle()
    if not run.agreement.stop:
        dist.all_reduce(sums)
        run.log_evaluation(*sums.tolist(), wrong)


def caption(image: Tensor, text: str) -> Tensor:
    picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).resize((128, 128))
    ImageDraw.Draw(picture).text((3, 1), text, fill="yellow", stroke_fill="black", stroke_width=1)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def train(config: Config) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    check_alone(world, "pp_resnet.py")
    devices, parts = find_devices(config.devices, "cpu,cpu"), config.accumulate * config.micro_batches
    sizes, device = given_sizes(config, len(devices)), devices[0]
    meaning = f"--accumulate {config.accumulate} x --micro-batches {config.micro_batches}"
    check_divides(config.batch_size, parts, meaning)
    setup_distributed(config, device)
    agreement = Agreement(config)
    classes, train_images, val_images = build_data(config, agreement)
    run = Run(config, agreement, device, len(train_images))
    run.devices = list(dict.fromkeys(devices))
    if run.evaluated == run.step >= run.last:
        run.say(f"{run.path} is finished, after step {run.step}: {run.result}")
        run.export(run.state)
        return
    model = build_model(config, len(classes), device)
    seconds = [] if sizes else time_copies(model, config, device)
    sizes = sizes or balance(seconds, len(devices))
    place(model, devices, sizes)
    optimizer = build_optimizer(config, model)
    scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "fp16")
    if config.compile:
        for block in blocks_of(model):
            for module in block:
                module.compile()

    def micro_step(images: Tensor, labels: Tensor) -> Tensor:
        """Add to the gradients; returns the sums of loss, hits and images. First all forward passes are launched,
        then one backward pass, for which autograd has a thread per device: the devices overlap in both."""
        with run.timed("forward"), autocast(config, device):
            images = to_input(images, config, device)
            logits = torch.cat([model(part) for part in images.chunk(config.micro_batches)])
        labels = labels.to(logits.device, non_blocking=True)
        loss = sum_loss(logits, labels, config)
        scaler.scale(loss / config.batch_size).backward()
        return torch.stack([loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()]).to(device)

    if run.state:
        restore(run.state, model, optimizer, scaler)
    share = config.batch_size // parts

    def evaluate_if_due() -> None:
        every = config.eval_every * run.steps_per_epoch
        if run.evaluated < run.step and (run.step == run.last or run.step % every == 0):
            with run.timed("evaluation"):
                batches = eval_batches(config, len(val_images), dist.get_rank(), world)
                evaluate(model, build_loader(val_images, batches, config, device), classes, run)

    batches = train_batches(config, len(train_images), run.step, run.last, dist.get_rank(), world)
    loader = iter(build_loader(train_images, batches, config, device))
    million = sum(p.numel() for p in model.parameters()) / 1e6
    facts = {
        "model": f"{config.arch}, {million:.1f} M parameters, {config.norm} norm, {config.dtype}",
        "stages": ", ".join(f"{size} blocks on {d}" for size, d in zip(sizes, devices, strict=True)),
        "cut by": " ".join(f"{1000 * s:.1f}" for s in seconds) + " ms per block" if seconds else "--balance",
        "global batch": f"{config.batch_size} = {config.micro_batches} x {share} x {config.accumulate} accumulated",
        "data": f"{config.data}: {len(train_images)} + {len(val_images)} images, {len(classes)} classes",
        "steps": f"{run.step} to {run.last}, {run.steps_per_epoch} an epoch",
        "run": f"{run.path}; watch it with: tensorboard --logdir runs",
    }
    with run.logging(facts):
        evaluate_if_due()  # a stop may have cut it short
        while run.step < run.last:
            micro_batches = run.fetch(loader)
            if agreement.stop:
                break
            sums = sum(micro_step(*batch) for batch in micro_batches)
            rate = learning_rate(config, (run.step + 0.5) / run.steps_per_epoch)
            run.advance(rate, sums, optimizer_step(config, model, optimizer, scaler, rate))
            evaluate_if_due()
            if agreement.save or config.save_every and run.step % config.save_every == 0:
                with run.timed("checkpoint"):
                    run.save(snapshot(model, optimizer, scaler))
        run.finish(snapshot(model, optimizer, scaler))


@record
def main(config_type: type[Config]) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    code = 0
    try:
        train(parse(config_type))
    except Failure as failure:
        code = failure.code
        if os.environ.get("RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if code != 1:  # where all ranks fail alike, rank 0 must speak before torchrun ends it for our sake
                time.sleep(5)
        elif str(failure):
            print(f"{Path(__file__).name}: {failure}", file=sys.stderr, flush=True)
    finally:  # loader workers ignore the SIGTERM of multiprocessing's own clean-up, which would wait for ever
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Python's handlers end before the process does
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main(ModelParallel)
