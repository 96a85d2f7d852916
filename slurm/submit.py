"""Submit a recipe through Submitit, to Slurm or to this machine.

    python slurm/submit.py --nodes 2 --gpus-per-node 8 recipes/ddp_resnet.py --epochs 90
    python slurm/submit.py --follow recipes/ddp_resnet.py
    python slurm/submit.py --sweep lr=0.1,0.2 seed=0,1 recipes/ddp_resnet.py
    python slurm/submit.py --cluster local --follow recipes/ddp_resnet.py

The job itself is slurm/train.sbatch, so that it stops, saves and is requeued as with sbatch; what
Submitit adds is arrays, options checked before anything waits in a queue, and a log to follow.
"""

import argparse
import ctypes
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

try:
    import submitit
    from submitit.slurm.slurm import _make_sbatch_string
except ImportError:
    python = ROOT / ".venv/bin/python"
    if Path(sys.prefix) == ROOT / ".venv" or not python.exists():
        sys.exit("submit.py: Submitit is missing; ./launch.sh --setup-only installs it")
    os.execv(python, [str(python), *sys.argv])

# Loads a recipe without running it, and reads options as it would. What depends on the machine,
# such as the number of GPUs, is left to the job.
CHECK = """
import importlib.util, json, sys
import tyro
recipe = sys.argv[1]
spec = importlib.util.spec_from_file_location("recipe", recipe)
module = sys.modules["recipe"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
configs = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, module.Config)]
for options in json.loads(sys.argv[2]):
    tyro.cli(max(configs, key=lambda c: len(c.__mro__)), prog=recipe, description=module.__doc__, args=options)
"""


@dataclass
class Train:
    """What Submitit runs, once per job: train.sbatch inside the batch step, or launch.sh here."""

    command: list[str]
    visible: str | None  # CUDA_VISIBLE_DEVICES; where Slurm gives devices out, it sets it itself

    def __call__(self):
        on_slurm = "SLURM_JOB_ID" in os.environ
        env = {**os.environ, "CHECKOUT": str(ROOT)}
        if not on_slurm:  # Submitit's local executor hides all GPUs
            env.pop("CUDA_VISIBLE_DEVICES", None)
            if self.visible is not None:
                env["CUDA_VISIBLE_DEVICES"] = self.visible
        child = subprocess.Popen(self.command, env=env, preexec_fn=end_with_parent)
        # In place of Submitit's handlers, which requeue at once: the save comes first.
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
        if code and on_slurm:
            sys.exit(code if code > 0 else 128 - code)  # the job's exit code, without a traceback
        return code


def end_with_parent():
    """In the child: get a SIGTERM, and so save, when the process that started it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main():
    args, recipe, options = arguments()
    points = sweep_points(args.sweep)
    check_options(recipe, [[*options, *point] for point in points])
    base = option(options, "--name")
    if args.sweep:
        base = base or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
        names = [f"{base}/{','.join(word[2:] for word in point)}" for point in points]
    elif args.cluster == "local":
        names = [base or time.strftime("%Y%m%d-%H%M%S")]
    else:
        names = [base]  # None: the job's id, which train.sbatch knows
    commands = [
        [*options, *point, *([f"--name={name}"] if name else [])] for point, name in zip(points, names, strict=True)
    ]
    folder = Path("runs/submitit").absolute()
    start = [str(ROOT / "launch.sh")] if args.cluster == "local" else ["bash", str(ROOT / "slurm/train.sbatch")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    trainings = [Train([*start, recipe, *command], visible) for command in commands]

    if args.dry_run:
        if args.cluster == "slurm":
            array = {"map_count": len(points)} if len(points) > 1 else {}
            print(_make_sbatch_string("", folder, **array, **slurm_parameters(args)).rstrip())
        for training in trainings:
            print(shlex.join(training.command))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if args.cluster == "local":
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
    else:
        if not shutil.which("sbatch"):
            sys.exit("submit.py: no sbatch on this machine; --cluster local trains here")
        leave_allocation()
        # exec: Slurm signals the process of the batch script alone, and that must be ours.
        executor = submitit.SlurmExecutor(folder, python=f"exec {shlex.quote(sys.executable)}")
        executor.update_parameters(**slurm_parameters(args))
    try:
        if len(trainings) > 1:
            with executor.batch():
                jobs = [executor.submit(training) for training in trainings]
        else:
            jobs = [executor.submit(training) for training in trainings]
    except submitit.core.utils.FailedJobError as error:
        sys.exit(f"submit.py: {str(error).strip().splitlines()[-1]}")  # sbatch's own reason
    runs = [Run(job, name or str(job.job_id)) for job, name in zip(jobs, names, strict=True)]
    for run in runs:
        print(f"job {run.job.job_id}: runs/{run.name}, log {os.path.relpath(run.log)}", flush=True)
    if args.cluster == "slurm":
        print(f"to cancel: scancel {str(jobs[0].job_id).partition('_')[0]}", flush=True)
    return follow(runs) if args.follow else 0


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm", help="local: this machine")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", default="1", help="a number, or TYPE:NUMBER (default: 1)")
    parser.add_argument("--cpus-per-task", type=int, default=8, help="cores on each node (default: 8)")
    parser.add_argument("--time", default="1-00:00:00", help="limit, as for sbatch (default: a day)")
    for name in ("partition", "account", "qos", "constraint", "mem"):
        parser.add_argument(f"--{name}", help="as for sbatch")
    parser.add_argument("--sweep", nargs="+", default=[], metavar="OPTION=A,B", help="one run for each combination")
    parser.add_argument("--follow", action="store_true", help="show the log, and end as the job ends")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    # The recipe ends the options of this script; all that follows is the recipe's.
    words = sys.argv[1:]
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    args = parser.parse_args(words[:at])
    if at == len(words):
        parser.error("which recipe? For example recipes/ddp_resnet.py")
    if not Path(words[at]).is_file():
        parser.error(f"no such recipe: {words[at]}")
    for item in args.sweep:
        if not re.fullmatch(r"[\w-]+=[^,]+(,[^,]+)*", item):
            parser.error(f"--sweep takes OPTION=VALUE,VALUE,..., not {item}")
    if args.cluster == "local" and (args.nodes > 1 or len(sweep_points(args.sweep)) > 1):
        parser.error("--cluster local is this machine: one node, one run at a time")
    return args, words[at], words[at + 1 :]


def sweep_points(items):
    """The options of each run: [["--lr=0.1", "--seed=0"], ...]; [[]] without a sweep."""
    names = [item.partition("=")[0] for item in items]
    values = [item.partition("=")[2].split(",") for item in items]
    return [[f"--{n}={v}" for n, v in zip(names, point, strict=True)] for point in itertools.product(*values)]


def option(options, name):
    """The value of an option of the recipe, or None."""
    for i, word in enumerate(options):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and i + 1 < len(options):
            return options[i + 1]
    return None


def check_options(recipe, commands):
    """End with the recipe's own message if it does not know an option: not after a day in the queue."""
    if "\nclass Config" not in Path(recipe).read_text():
        return  # no recipe like ours: to import it could be to run it
    done = subprocess.run([sys.executable, "-c", CHECK, recipe, json.dumps(commands)])
    if done.returncode or {"-h", "--help"} & {*commands[0]}:
        sys.exit(done.returncode)


def slurm_parameters(args):
    options = {name: getattr(args, name) for name in ("partition", "account", "qos", "constraint", "mem")}
    return {
        "nodes": args.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": args.cpus_per_task,
        "job_name": "resnet",
        "stderr_to_stdout": True,
        "use_srun": False,  # train.sbatch does that
        "additional_parameters": {
            "time": args.time,
            "gpus-per-node": args.gpus_per_node,
            "signal": "B:USR1@180",
            "requeue": True,
            **{name: value for name, value in options.items() if value},
        },
    }


def leave_allocation():
    """Within a job, sbatch would pass the variables of that job on to the new one."""
    if "SLURM_JOB_ID" in os.environ:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        for name in [*os.environ]:
            if name.startswith(("SLURM_", "SRUN_", "SUBMITIT_")) and name != "SLURM_CONF":
                del os.environ[name]


class Run:
    """A job as --follow sees it."""

    ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

    def __init__(self, job, name):
        self.job, self.name, self.log, self.read = job, name, job.paths.stdout, 0

    def new_output(self):
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self.read)
            text = file.read()
        self.read += len(text)
        return text.decode(errors="replace")

    def state(self):
        """State and exit code, from whoever still knows the job; (None, 0) while it is not over."""
        if isinstance(self.job, submitit.LocalJob):
            if not self.job.done():
                return None, 0
            code = self.job.result() if self.job.paths.result_pickle.exists() else 1
            return ("FAILED" if code else "COMPLETED"), code
        job_id = str(self.job.job_id)
        queue = ask("squeue", "--me", "-h", "-r", "-o", "%i")
        if queue is None or job_id in queue.split():
            return None, 0  # not over, or the controller is away for now
        account = ask("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job_id) or ""
        known = re.match(r"(\w+)[^|]*\|(\d+):", account)
        if not known:  # no accounting; the controller knows it for some minutes more
            show = ask("scontrol", "--oneliner", "show", "job", job_id) or ""
            known = re.search(r" JobState=(\w+) .* ExitCode=(\d+):", show)
        if known:
            return (known[1] if known[1] in self.ENDED else None), int(known[2])
        try:  # the run itself
            ended = json.loads(Path("runs", self.name, "status.json").read_text())["status"]
        except (OSError, ValueError):
            ended = ""
        return ("COMPLETED", 0) if ended == "finished" else ("FAILED", 1)


def ask(*command):
    """What a command of Slurm's prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # not installed
        return None
    return done.stdout if done.returncode == 0 else None


def follow(runs):
    """Print the logs as they grow. The others than rank 0 write only when something goes wrong."""
    worst, left = 0, list(runs)
    try:
        while left:
            for run in [*left]:
                state, code = run.state()
                lines = run.new_output()
                if len(runs) > 1:
                    lines = re.sub(r"(?m)^(?=.)", f"[{run.name.rpartition('/')[2]}] ", lines)
                print(lines, end="", flush=True)
                if state:
                    print(f"job {run.job.job_id}: {state}", flush=True)
                    worst = max(worst, code or int(state != "COMPLETED"))
                    left.remove(run)
            time.sleep(1 if left else 0)
    except KeyboardInterrupt:
        print("\nno longer following; the job goes on")
        worst = 130
    return worst


if __name__ == "__main__":
    sys.exit(main())
