"""Train a ResNet by fully sharded data parallelism: one process per device, each with a shard of the model.

Every process computes the gradient of its share of the global batch, as in ddp_resnet.py, but keeps only
1/N of the parameters, of their gradients and of the momentum. FSDP2's `fully_shard` gathers a residual
block's parameters just before it runs, forward and backward, frees them after, and reduces each gradient to
the process that keeps it. That is half as much again to communicate as in DDP: choose it where the model
and its optimizer don't fit one device, or leave too little room for activations. ResNets do fit. On two CPU
cores 1.56 times the speed of one, where DDP has 1.92 (ResNet-18, 64x64, batch 128, by benchmarks/strategies.py).

    torchrun --nproc_per_node=4 recipes/fsdp_resnet.py             # four devices of this machine
    ./launch.sh recipes/fsdp_resnet.py --data /data/imagenet --arch resnet152 --batch-size 1024 --lr 0.4
    ./launch.sh recipes/fsdp_resnet.py --hybrid-shard              # several nodes: gather within each only

With `--norm batch` a process normalizes by its own share of the batch, and the running statistics, which are
not sharded, are those of rank 0: results differ a little with the number of processes. `--norm sync` (CUDA)
takes the statistics over all processes, `--norm group` needs none. Everything else is the same for any number
of processes and loader workers and after any number of restarts. A checkpoint holds the whole model, gathered
tensor by tensor, and fits every recipe; for a model beyond one host's memory see torch.distributed.checkpoint.
"""
# Processes: one per device.

import contextlib
import ctypes
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import tyro
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, make_grid
from tqdm import tqdm

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOST = re.compile("(?i)(?<!DataLoader )timed out|timeout|by peer|monitoredBarrier")  # gloo has no type for it
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
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"  # bf16: by autocast
    on_bad_image: Literal["stop", "skip"] = "stop"  # a file that can't be decoded ends the run, or is left out
    seed: int = 0  # of weights, sample order and augmentation


@dataclass
class Config(Training):
    """How it is computed. May change whenever a run goes on."""

    accumulate: int = 1  # micro-batches per optimizer step, when the batch doesn't fit into memory
    workers: int | None = None  # loader processes per rank; default: this rank's share of the cores, less one
    channels_last: bool = False  # the memory format of tensor cores: use it with bf16
    compile: bool = False
    deterministic: bool = False  # bit-identical reruns on CUDA, slower
    eval_every: int = 1  # epochs; the end of the run is always evaluated
    save_every: int = 500  # steps
    keep: int = 2  # checkpoints
    log_every: int = 10  # steps
    max_steps: int = 0  # end before the last epoch, on the same schedule; 0: don't
    name: str = ""  # the run is runs/NAME, and goes on if it exists; default: Slurm's job id, else the time
    resume: str = "auto"  # or the checkpoint with which a new run begins
    export: str = ""  # file for the final weights: a state dict under torchvision's names
    profile: bool = False  # write a Chrome trace of three steps into the run directory
    timeout: float = 600.0  # seconds to wait for another process before giving up


@dataclass
class FullySharded(Config):
    """How the model is sharded."""

    hybrid_shard: bool = False  # over the processes of a node only, with a replica on each node


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
    for field in fields(config):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        least = 1 if field.name == "timeout" or field.type is int and field.default else 0
        most = 1 if field.name in ("momentum", "label_smoothing") else sys.float_info.max
        if isinstance(value, int | float) and not least <= value <= most:
            raise Failure(f"--{option} {value}: must be at least {least}" + ", at most 1" * (most == 1))
    if config.export and not Path(config.export).absolute().parent.is_dir():
        raise Failure(f"--export {config.export}: its directory doesn't exist")
    if config.norm == "sync" and not torch.cuda.is_available():
        raise Failure("--norm sync: needs CUDA, and there is no GPU here")
    config.image_size = config.image_size or (32 if config.data == "digits" else 224)
    if config.workers is None:
        config.workers = max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1, 0)
    return config


def check_divides(batch_size: int, parts: int, meaning: str) -> None:
    """Raises Failure, naming the nearest sizes that fit, unless the batch divides into equal parts."""
    if batch_size % parts:
        fit = [str(count * parts) for count in (batch_size // parts, batch_size // parts + 1) if count]
        raise Failure(f"--batch-size {batch_size}: doesn't divide by {parts} ({meaning}); {' or '.join(fit)} would")


def local_device() -> torch.device:
    """This process's own GPU, or the CPU where there is none."""
    gpus, local_world = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < gpus < local_world:
        raise Failure(f"{local_world} processes for {gpus} GPUs: start one per GPU")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpus else torch.device("cpu")


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
        # NCCL's watchdog ends a process without a word about who is missing: Run gives up first.
        dist.init_process_group("nccl", timeout=2 * timeout, device_id=device, **where)
    else:
        dist.init_process_group("gloo", timeout=timeout, **where)


def on_rank_0(function, *arguments):
    """What the function gives on rank 0, for every rank. If it fails there, the others lose rank 0 and end too."""
    answer = [function(*arguments) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def build_data(config: Config) -> tuple[list[str], "Images", "Images"]:
    """Class names, training and validation images."""
    if config.data == "synthetic":
        classes = [str(k) for k in range(1000)]
        splits = [(np.arange(count), np.arange(count) % 1000) for count in (100_000, 1_000)]
    elif config.data == "digits":  # 1797 handwritten digits of 8x8 pixels, of which every fifth validates
        # Read from where scikit-learn has them, as its import takes a second.
        [package] = find_spec("sklearn").submodule_search_locations
        table = np.loadtxt(Path(package, "datasets/data/digits.csv.gz"), delimiter=",")
        pixels, labels = np.uint8(table[:, :64] * 255 / 16).reshape(-1, 8, 8), table[:, 64].astype(int)
        val = np.arange(len(table)) % 5 == 4
        classes, splits = list("0123456789"), [(pixels[part], labels[part]) for part in (~val, val)]
    else:
        classes, splits = on_rank_0(scan, config.data)
    return classes, Images(*splits[0], config, train=True), Images(*splits[1], config, train=False)


def scan(root: str) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]]]:
    """Class names, and paths (bytes) and labels of train and val. Arrays, since loader workers copy a list of
    a million strings page by page as they read it. Raises Failure if the directory is laid out otherwise."""
    try:
        train, val = splits = [ImageFolder(Path(root, split)) for split in ("train", "val")]
    except OSError as error:
        raise Failure(f"--data {root}: {error}") from None
    if odd := sorted(set(train.classes) ^ set(val.classes)):
        raise Failure(f"--data {root}: train and val must have the same classes; only one has {', '.join(odd[:5])}")
    return train.classes, [(np.array([os.fsencode(p) for p, _ in s.samples]), np.array(s.targets)) for s in splits]


class Images:
    """A list of (epoch, index) gives a batch: images, uint8 [n, 3, size, size], and labels, int64 [n].

    Crop and flip are drawn from (seed, epoch, index), so that an image looks the same whoever loads it. One
    that can't be read is named and has the label -1, which loss and accuracy ignore.
    """

    def __init__(self, source: np.ndarray, labels: np.ndarray, config: Training, train: bool):
        self.source, self.labels, self.train = source, torch.from_numpy(labels), train
        self.size, self.seed, digits = config.image_size, config.seed, config.data == "digits"
        crop = (
            v2.RandomResizedCrop(self.size, (0.6 if digits else 0.08, 1)),
            v2.RandomHorizontalFlip(0.5 * (not digits)),
        )
        whole = v2.Resize(self.size if digits else round(self.size / 0.875)), v2.CenterCrop(self.size)
        self.transform = v2.Compose([v2.PILToTensor(), *(crop if train else whole)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        images = torch.zeros(len(keys), 3, self.size, self.size, dtype=torch.uint8)
        labels = self.labels[[index for _, index in keys]]
        for slot, (epoch, index) in enumerate(keys):
            draw = np.random.SeedSequence((self.seed, epoch, index)).generate_state(1)
            torch.default_generator.manual_seed(int(draw[0]))
            source = self.source[index]
            try:
                picture = Image.open(os.fsdecode(source)) if isinstance(source, bytes) else Image.fromarray(source)
                if self.train:  # decodes a large JPEG at a half, a quarter or an eighth, for a fraction of the time
                    picture.draft("RGB", (3 * self.size, 3 * self.size))
                images[slot] = self.transform(picture.convert("RGB"))
            except Exception as error:  # a broken file makes PIL raise almost any type
                labels[slot], reason = -1, str(error).partition(" <_io")[0]
                print(f"cannot read {os.fsdecode(source)}: {reason}", file=sys.stderr, flush=True)
        return images, labels


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
        return ((noise[(index % 256).to(device, non_blocking=True)], images.labels[index]) for index in indices)
    return DataLoader(
        images,
        batch_size=None,  # the sampler gives whole batches, and Images loads them
        sampler=batches,
        num_workers=config.workers,
        worker_init_fn=start_worker,
        timeout=config.timeout if config.workers else 0,
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
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16")


def build_mesh(config: Config, device: torch.device, width: int, names: tuple[str, str]) -> DeviceMesh:
    """All ranks in rows of `width` neighbours, which share a node if they can. The names are those of the columns,
    of which rank 0 leads the first, and of the rows. torch's init_device_mesh would take no timeout."""
    grid = torch.arange(dist.get_world_size()).view(-1, width)
    timeout = timedelta(seconds=config.timeout) * (2 if device.type == "cuda" else 1)  # as in setup_distributed
    groups = [dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)[0] for ranks in (grid.T, grid)]
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=names)


def shard_model(model: nn.Module, config: FullySharded, device: torch.device) -> None:
    """Make each residual block a unit that is gathered and freed as one; stem and head form the last.

    bf16 halves what is gathered; gradients are still summed in fp32. Autocast stays, so that each
    operation has the precision that it has in ddp. The norms' parameters must stay fp32 for cuDNN: as they are
    few, they form one unit, gathered once.
    """
    model.to(memory_format=torch.contiguous_format)  # FSDP needs it; the images alone make cuDNN use channels_last
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if config.hybrid_shard:
        mesh = build_mesh(config, device, int(os.environ["LOCAL_WORLD_SIZE"]), ("replicate", "shard"))
    half = torch.bfloat16 if config.dtype == "bf16" else None
    if half:
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.SyncBatchNorm | nn.GroupNorm)]
        fully_shard(norms, mesh=mesh, reshard_after_forward=False)
    blocks = [block for name, layer in model.named_children() if name.startswith("layer") for block in layer]
    for unit in (*blocks, model):
        if config.compile and unit is not model:
            unit.compile()
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(half, torch.float32 if half else None))


def sharded_norm(gradients: list[Tensor]) -> Tensor:
    return nn.utils.get_total_norm(gradients).full_tensor()  # sums over the shards


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


def optimizer_step(config: Config, model, optimizer, rate: float, total_norm=nn.utils.get_total_norm) -> Tensor:
    """Clip, step, and clear the gradients; returns their norm before clipping."""
    norm = total_norm([p.grad for p in model.parameters()])
    if config.clip_grad_norm:
        nn.utils.clip_grads_with_norm_(model.parameters(), config.clip_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


# ---- Run directory


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The whole state in CPU memory of rank 0, under torchvision's names: the same format for every strategy.
    All ranks call it, as they must gather the same tensors in the same order."""
    shards = model.state_dict()  # first, as it shards again the parameters that an evaluation leaves whole
    momentum = {name: optimizer.state[p].get("momentum_buffer") for name, p in model.named_parameters()}
    state = {"model": {}, "momentum": {}}
    for part, tensors in (("model", shards), ("momentum", momentum)):
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # buffers aren't sharded
            if whole is not None and dist.get_rank() == 0:
                state[part][name] = whole.to("cpu", copy=True)
    return state


def shard_state(state: dict, model: nn.Module) -> dict:
    """The state with each tensor cut like the parameter of its name."""
    parameters = dict(model.named_parameters())

    def shard(name: str, tensor: Tensor) -> Tensor:
        if name not in parameters:
            return tensor
        return distribute_tensor(tensor, parameters[name].device_mesh, parameters[name].placements, src_data_rank=None)

    for part in ("model", "momentum"):
        state[part] = {name: shard(name, tensor) for name, tensor in state[part].items()}
    return state


def restore(state: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
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


def open_run(config: Config) -> tuple[Path, dict]:
    """The run directory, and the newest checkpoint in it that loads ({} for a new run).

    Raises Failure if it can't be written to, or holds a run with other values of Training.
    """
    # By default the start of torchrun names the run: a worker that torchrun restarts must find it again.
    starter = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None)
    started = f"{datetime.fromtimestamp(starter.create_time()):%Y%m%d-%H%M%S}-{starter.pid}"
    run, state = Path("runs", config.name or os.environ.get("SLURM_JOB_ID") or started), {}
    paths = sorted(run.glob("step_*.pt"), reverse=True) or [Path(config.resume)] * (config.resume != "auto")
    for path, older in itertools.zip_longest(paths, paths[1:]):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            pairs = {f.name: (state["config"][f.name], getattr(config, f.name)) for f in fields(Training)}
        except Exception as error:  # a damaged file makes torch.load raise almost any type
            problem = f"cannot load {path}: {str(error).splitlines()[0]}"
            if not older:
                raise Failure(problem) from None
            print(f"{problem}; going on from {older}", file=sys.stderr)
            continue
        changed = [f"--{k.replace('_', '-')} {old}, not {new}" for k, (old, new) in pairs.items() if old != new]
        if changed:
            raise Failure(f"{path} is of a run with {'; '.join(changed)}: change it back or take another --name")
        break
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_file(run / "config.json", lambda file: file.write(json.dumps(vars(config), indent=1).encode()))
    except OSError as error:
        raise Failure(f"cannot write to the run directory {run}: {error.strerror}") from None
    return run, state


class Run:
    """Where a run stands, whether it must stop, and what it leaves: console, TensorBoard, checkpoints, status.json.

    All ranks call its methods alike; rank 0 writes.
    """

    def __init__(self, config: Config, device: torch.device, images: int):
        self.config, self.leader = config, dist.get_rank() == 0
        self.device, self.devices = device, [device]  # of the model's input; whose peak memory is logged
        self.steps_per_epoch = images // config.batch_size
        if not self.steps_per_epoch:
            raise Failure(f"--batch-size {config.batch_size}: there are only {images} training images")
        self.path, self.state = on_rank_0(open_run, config)
        self.step = self.first = self.state.get("step", 0)
        self.last = max(self.step, min(config.epochs * self.steps_per_epoch, config.max_steps or math.inf))
        self.evaluated, self.result = self.state.get("evaluated", 0), self.state.get("result", "")
        self.saved, self.saving, self.saver = (self.step, self.evaluated), None, ThreadPoolExecutor(1)
        # Since the last log line; those of a checkpoint were summed over the ranks, and so count on one of them.
        self.rows = [*torch.tensor(self.state.get("rows", []), dtype=torch.float64, device=device) * self.leader]
        self.spent, self.memory, self.began = Counter(), [0.0], time.perf_counter()
        self.logged, self.digits = (self.step, self.began, Counter()), 16 if config.dtype == "fp64" else 5
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout))  # waits for no GPU
        # To ask who is missing when a wait was in vain; the others wait for rank 0 as long as the group allows.
        self.roll_call = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
        self.signal, self.stop, self.work = 0, 0, None
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C doesn't wait for the save

    def must_stop(self) -> bool:
        """Whether a rank had a signal before its last call, so that all stop after the same step. Reads the flags
        that were sent then and sends those of now: no step waits for another rank."""
        if self.work:
            self.work.wait()
            self.stop = max(self.stop, int(self.flag))
        self.flag = torch.tensor(self.signal)
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return self.stop > 0

    @contextlib.contextmanager
    def logging(self, facts: dict[str, str]):
        """Say what runs where, and keep events and status.json open until the run ends, one way or another."""
        self.say("\n".join(f"{name:13}{fact}" for name, fact in facts.items()))
        trace = contextlib.nullcontext()
        if self.leader:
            # purge_step hides what a killed run logged beyond the step where this one begins.
            self.writer = SummaryWriter(self.path, purge_step=self.step + 1 if self.step else 0)
            self.bar = tqdm(initial=self.step, total=self.last, unit="step", disable=None)  # only on a terminal
            options = vars(self.config)
            self.writer.add_text("config", "\n".join(f"    {name}: {options[name]}" for name in options), self.step)
            for summary in hparams(options, {"eval/top1": 0, "eval/loss": 0}):
                self.writer.file_writer.add_summary(summary, self.step)  # add_hparams would make a run of its own
            if self.config.profile:
                steps = schedule(skip_first=2, wait=0, warmup=1, active=3, repeat=1)
                trace = profile(schedule=steps, on_trace_ready=tensorboard_trace_handler(self.path))
        self.status("running")
        try:
            with trace as self.profiler:
                yield
        except BaseException as error:
            self.status("failed", str(error))
            if LOST.search(str(error)):  # this names the ranks that don't answer
                dist.monitored_barrier(self.roll_call, timedelta(seconds=5), wait_all_ranks=True)
            raise
        finally:
            if self.leader:
                self.bar.close()
                self.writer.close()
            self.saver.shutdown()

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.last

    def say(self, text: str) -> None:
        if self.leader:
            tqdm.write(text)
            sys.stdout.flush()

    def status(self, status: str, reason: str = "") -> None:
        """For job scripts, as torchrun doesn't pass on the exit code of a recipe."""
        facts = {"status": status, "step": self.step, "started_at_step": self.first, "reason": reason}
        if self.leader:
            write_file(self.path / "status.json", lambda file: file.write(json.dumps(facts).encode()))

    @contextlib.contextmanager
    def timed(self, what: str):
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def advance(self, rate: float, sums: Tensor, norm: Tensor) -> None:
        """Count a step. This rank's sums of loss, hits and images, and the gradient norm, stay on the device
        until the next log line or checkpoint: to read them in every step would stall it."""
        self.step += 1
        self.rows.append(torch.cat([sums, norm[None] / dist.get_world_size()]).double())
        if self.leader:
            self.bar.update()
        if self.profiler:
            self.profiler.step()
        if self.is_due(self.config.log_every):
            self.log(rate)

    def sum_rows(self) -> list[list[float]]:
        """The rows since the last log line, summed over ranks. In float64 a sum of few float32 is exact: it doesn't
        show where a restart cut the interval. Raises Failure where a loss is not finite or an image is missing."""
        table = torch.stack([torch.zeros(4, dtype=torch.float64, device=self.device), *self.rows])
        dist.all_reduce(table)
        rows = table[1:].tolist()
        for step, (loss, _, images, norm) in enumerate(rows, self.step + 1 - len(rows)):
            self.check_readable(self.config.batch_size - images)
            if not math.isfinite(loss + norm):
                what = f"loss {loss:.4g}, gradient norm {norm:.4g} in step {step}"
                raise Failure(f"{what}; the newest checkpoint is of step {self.saved[0]}; try a lower --lr", 3)
        return rows

    def check_readable(self, missing: float) -> None:
        if missing and self.config.on_bad_image == "stop":
            raise Failure(f"{missing:.0f} images can't be read; --on-bad-image skip would leave them out")

    def log(self, rate: float) -> None:
        loss, hits, images, norms = map(sum, zip(*self.sum_rows(), strict=True))
        norm, self.rows = norms / len(self.rows), []
        (step, began, before), now = self.logged, time.perf_counter()
        self.logged, steps, spent = (self.step, now, self.spent.copy()), self.step - step, self.spent - before
        elapsed = now - began - spent["evaluation"] - spent["checkpoint"]
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = [torch.cuda.max_memory_allocated(d) if d.type == "cuda" else host for d in self.devices]
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (spent["data"] + spent["forward"], peaks), self.group)
        busy, self.memory = [own for own, _ in ranks], [peak / 2**30 for _, peaks in ranks for peak in peaks]
        scalars = {
            "train/loss": loss / max(images, 1),
            "train/accuracy": hits / max(images, 1),
            "train/learning_rate": rate,
            "train/gradient_norm": norm,
            "speed/images_per_second": steps * self.config.batch_size / elapsed,
            "speed/step_ms": 1000 * elapsed / steps,
            "speed/data_wait_fraction": spent["data"] / elapsed,
            "speed/slowest_over_fastest_rank": max(busy) / min(busy),
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

    def save(self, state: dict) -> None:
        """Write a checkpoint from a thread, while training goes on."""
        facts = {"step": self.step, "evaluated": self.evaluated, "result": self.result, "rows": self.sum_rows()}
        self.saved = self.step, self.evaluated
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
        """Wait until the last checkpoint is safe, and say how the run ended."""
        with self.timed("checkpoint"):
            if self.saving:
                self.saving.result()
        if not self.evaluated == self.step == self.last:
            reason = signal.Signals(self.stop).name
            self.status("stopped", reason)
            self.say(f"stopped by {reason} after step {self.step}; --name {self.path.name} goes on from there")
            return
        if self.leader and self.config.export:
            write_file(Path(self.config.export), lambda file: torch.save(state["model"], file))
        self.status("finished")
        total = time.perf_counter() - self.began
        parts = {what: self.spent[what] for what in ("data", "evaluation", "checkpoint")}
        parts["step"] = total - sum(parts.values())
        self.say(f"finished after step {self.step}: {self.result}; at most {max(self.memory):.2f} GiB per device")
        self.say(f"{total:.1f} s: " + ", ".join(f"{what} {100 * t / total:.1f} %" for what, t in parts.items()))


@torch.no_grad()
def evaluate(model: nn.Module, batches, total: int, classes: list[str], run: Run) -> None:
    """Loss and accuracy over every validation image once, unless the run is told to stop meanwhile."""
    sums, wrong = torch.zeros(4, dtype=torch.float64, device=run.device), []
    model.eval()
    for images, labels in batches:
        if run.must_stop():
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
                picture = F.interpolate(images[k : k + 1].cpu(), 128)[0]
                text = f"{classes[labels[k]]} taken for {classes[best[k, 0]]}"
                wrong.append(draw_bounding_boxes(picture, torch.zeros(1, 4), [text], colors="yellow"))
    model.train()
    if run.stop:
        return
    dist.all_reduce(sums)
    loss, top1, top5, images = sums.tolist()
    run.check_readable(total - images)
    run.evaluated, run.result = run.step, f"top-1 {100 * top1 / images:.2f} % ({top1:.0f}/{images:.0f})"
    run.say(f"step {run.step}/{run.last}  evaluation: loss {loss / images:.{run.digits}g}, {run.result}")
    run.scalars({"eval/loss": loss / images, "eval/top1": top1 / images, "eval/top5": top5 / images})
    if wrong:
        run.writer.add_image("eval/wrong", make_grid(wrong, nrow=4), run.step)


def train(config: FullySharded) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    check_divides(config.batch_size, world * config.accumulate, f"{world} processes x --accumulate {config.accumulate}")
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.hybrid_shard and (world == local_world or world % local_world):
        why = "there is one node: shard over all its processes" if world == local_world else "nodes differ in processes"
        raise Failure(f"--hybrid-shard: {why}")
    device = local_device()
    setup_distributed(config, device)
    classes, train_images, val_images = build_data(config)
    run = Run(config, device, len(train_images))
    model = build_model(config, len(classes), device)
    shard_model(model, config, device)
    optimizer = build_optimizer(config, model, fused=False)  # torch has no fused SGD for shards

    def micro_step(images: Tensor, labels: Tensor, last: bool) -> Tensor:
        """Add to the gradients; returns the sums of loss, hits and images. Only the last backward pass of a
        step averages over the processes; before it every process adds up whole gradients of its own."""
        model.set_requires_gradient_sync(last)
        labels = labels.to(device, non_blocking=True)
        with run.timed("forward"), autocast(config, device):
            logits = model(to_input(images, config, device))
        loss = sum_loss(logits, labels, config)
        (loss * world / config.batch_size).backward()
        return torch.stack([loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])

    if run.state:
        restore(shard_state(run.state, model), model, optimizer)

    batches = train_batches(config, len(train_images), run.step, run.last, dist.get_rank(), world)
    loader = iter(build_loader(train_images, batches, config, device))
    share, million = config.batch_size // world // config.accumulate, sum(p.numel() for p in model.parameters()) / 1e6
    facts = {
        "model": f"{config.arch}, {million:.1f} M parameters, {config.norm} norm, {config.dtype}",
        "devices": f"{world} x {device}, {dist.get_backend()}, {torch.get_num_threads()} threads per process",
        "global batch": f"{config.batch_size} = {world} processes x {share} x {config.accumulate} accumulated",
        "data": f"{config.data}: {len(train_images)} + {len(val_images)} images, {len(classes)} classes",
        "steps": f"{run.step} to {run.last}, {run.steps_per_epoch} an epoch",
        "run": f"{run.path}; watch it with: tensorboard --logdir runs",
    }
    with run.logging(facts):
        while True:
            if run.is_due(config.eval_every * run.steps_per_epoch) and run.evaluated < run.step:
                for buffer in model.buffers():  # every rank evaluates its share with the statistics of rank 0
                    dist.broadcast(buffer, src=0)
                batches = eval_batches(config, len(val_images), dist.get_rank(), world)
                loaded = build_loader(val_images, batches, config, device)
                with run.timed("evaluation"):
                    evaluate(model, loaded, len(val_images), classes, run)
            if (run.stop or run.is_due(config.save_every)) and run.saved != (run.step, run.evaluated):
                with run.timed("checkpoint"):
                    run.save(snapshot(model, optimizer))
            if run.stop or run.step == run.last:
                break
            with run.timed("data"):
                micro_batches = list(itertools.islice(loader, config.accumulate))
            if run.leader and run.step == 0:
                run.writer.add_image("train/input", make_grid(micro_batches[0][0][:64]), 0)
            if not run.must_stop():
                sums = sum(micro_step(*batch, last=batch is micro_batches[-1]) for batch in micro_batches)
                rate = learning_rate(config, (run.step + 0.5) / run.steps_per_epoch)
                run.advance(rate, sums, optimizer_step(config, model, optimizer, rate, sharded_norm))
        run.finish(snapshot(model, optimizer))


@record
def main(config_type: type[Config]) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    code = 0
    try:
        train(parse(config_type))
    except (Failure, RuntimeError) as error:
        if not isinstance(error, Failure) and not LOST.search(str(error)):
            raise
        code = error.code if isinstance(error, Failure) else 1
        if os.environ.get("RANK", "0") != "0":  # where all ranks fail alike, torchrun must let rank 0 speak first
            time.sleep(5 if code > 1 else 0)
        elif str(error):
            print(f"{Path(__file__).name}: {error}", file=sys.stderr, flush=True)
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
    main(FullySharded)
