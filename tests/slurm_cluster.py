"""A Slurm of two nodes on this machine, with accounting: real daemons from Debian's packages.

All of it lies in one folder and ends with the test: a munged, a MariaDB and a slurmdbd on ports of
their own, slurmctld, and two slurmd that say they are n1 and n2 (names that do not resolve).
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from conftest import MARK, ROOT, processes, start, wait_until

SBIN = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd")
GPUS = 4  # per node; any device files do, as no test computes on them

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=15
SlurmdTimeout=10
ReturnToService=2
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=32 RealMemory=16000 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=32 RealMemory=16000 Gres=gpu:{gpus}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""
ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={folder}/munge.socket
JobAcctGatherType=jobacct_gather/linux
"""
SLURMDBD_CONF = """
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={slurmdbd}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb}
StorageUser=slurm
StoragePass={password}
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    def __init__(self, folder: Path, accounting=True):
        self.folder = folder
        self.accounting = accounting
        self.daemons = {}
        self.values = {
            "folder": folder,
            "host": socket.gethostname().partition(".")[0],
            "gpus": GPUS,
            "password": secrets.token_hex(16),
            **dict(zip(("slurmctld", "slurmdbd", "mariadb", "n1", "n2"), free_ports(5), strict=True)),
        }
        self.env = {**SBIN, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        try:
            self.bring_up()
        except BaseException:
            for name, job in self.daemons.items():
                print(f"{name}:\n{job.stdout[-2000:]}{job.stderr[-2000:]}")
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for job in [*self.daemons.values()][::-1]:
            job.__exit__()

    def daemon(self, name, *cmd):
        # Should the test runner be killed, they must not live on.
        self.daemons[name] = start(["setpriv", "--pdeathsig", "KILL", *cmd], self.folder, self.env)

    def write(self, name, template, mode=0o644):
        (self.folder / name).write_text(template.format(**self.values))
        (self.folder / name).chmod(mode)

    def bring_up(self):
        folder = self.folder
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        self.write("slurm.conf", SLURM_CONF + (ACCOUNTING if self.accounting else ""))
        self.write(
            "gres.conf",
            "NodeName=n1 Name=gpu File=/dev/loop[0-3]\nNodeName=n2 Name=gpu File=/dev/loop[0-3]\n",
        )
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        munge = [f"--{what}={folder}/munge.{what.partition('-')[0]}" for what in ("key-file", "pid-file", "seed-file")]
        self.daemon(
            "munged", "munged", "--foreground", "--force", *munge,
            f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log",
        )  # fmt: skip
        wait_until((folder / "munge.socket").exists, 10, "munged")
        if self.accounting:
            self.bring_up_accounting()
        self.daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.daemon(node, "slurmd", "-D", "-N", node)
        wait_until(lambda: self.node_states() == {"n1": "idle", "n2": "idle"}, 30, "both nodes to be idle")

    def bring_up_accounting(self):
        folder = self.folder
        self.write("slurmdbd.conf", SLURMDBD_CONF, 0o600)
        self.write(
            "users.sql",
            "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n",
            0o600,
        )
        data = ["--no-defaults", f"--datadir={folder}/mariadb", "--user=root"]
        subprocess.run(
            ["mariadb-install-db", *data, "--skip-test-db"], check=True, capture_output=True, env={**os.environ, **SBIN}
        )
        self.daemon(
            "mariadb", "mariadbd", *data, "--bind-address=127.0.0.1", f"--port={self.values['mariadb']}",
            f"--socket={folder}/mariadb.socket", f"--init-file={folder}/users.sql", "--skip-name-resolve",
            "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self.wait_for_port("mariadb")
        self.daemon("slurmdbd", "slurmdbd", "-D")
        self.wait_for_port("slurmdbd")

    def wait_for_port(self, name):
        def answers():
            assert self.daemons[name].process.poll() is None, self.daemons[name].stderr[-2000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.values[name])) == 0

        wait_until(answers, 30, name)

    # ---- what a user does ------------------------------------------------------------------

    def call(self, *cmd, cwd=None, env=None, check=True, timeout=60):
        """Run a command of Slurm's to its end; jobs that it starts carry the mark in env, if any."""
        done = subprocess.run(
            [str(word) for word in cmd],
            cwd=cwd or self.folder,
            env={**os.environ, **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, f"{cmd}: {done.stdout}{done.stderr}"
        return done

    def node_states(self):
        done = self.call("sinfo", "-N", "-h", "-p", "low", "-o", "%N %t", check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    def idle(self, timeout=30):
        wait_until(lambda: set(self.node_states().values()) == {"idle"}, timeout, "all nodes to be idle again")

    def sbatch(self, cwd, *args, env=None):
        """Submit a script with options before it; gives a BatchJob, whose processes carry a mark."""
        mark = uuid.uuid4().hex
        options = ["--parsable", "--cpus-per-task=2", "--time=10", f"--output={cwd}/%j.log"]
        env = {MARK: mark, "CHECKOUT": str(ROOT), **(env or {})}
        done = self.call("sbatch", *options, *args, cwd=cwd, env=env)
        return BatchJob(self, done.stdout.strip().split(";")[0], cwd, mark)

    def kill_node(self, node):
        """What a power cut leaves of a node: nothing; its slurmd, steps and all their children go."""
        daemon = self.daemons[node]
        name = f"SLURMD_NODENAME={node}".encode()
        for pid in {*daemon.processes(), *tree(daemon.pid), *holders(name)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive_node(self, node):
        self.daemons[node].__exit__()
        self.daemon(node, "slurmd", "-D", "-N", node)
        self.call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.idle()


def holders(entry):
    """Processes whose environment has this entry."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def tree(pid):
    """A process and its descendants."""
    found = {pid}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= tree(int(child))
    return found


class BatchJob:
    def __init__(self, cluster, job_id, cwd, mark):
        self.cluster, self.id, self.cwd, self.mark = cluster, job_id, cwd, mark

    @property
    def log(self):
        path = self.cwd / f"{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self):
        text = self.cluster.call("scontrol", "--oneliner", "show", "job", self.id).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    @property
    def state(self):
        return self.show()["JobState"]

    def processes(self):
        return processes(self.mark)

    def wait_for(self, text, timeout=120):
        def seen():
            if text in self.log:
                return True
            state = self.state
            assert state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") or text in self.log, (
                f"job is {state}, without {text!r}:\n{self.log}"
            )
            return False

        wait_until(seen, timeout, f"{text!r} in the log:\n{self.log}")

    def wait(self, timeout=120, idle=True):
        """The state in which the job ended; nothing of it may be left on any node."""
        deadline = time.monotonic() + timeout
        while (state := self.state) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "PREEMPTED"):
            assert time.monotonic() < deadline, f"still {state} after {timeout} s:\n{self.log}"
            time.sleep(0.3)
        if idle:
            self.cluster.idle()
        wait_until(lambda: not self.processes(), 6, f"{self.processes()} to end with the job")
        return state
