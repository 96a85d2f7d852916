"""What all tests share: run a command, wait within a limit, and leave no process behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Every process of a test carries a mark in its environment. torchrun puts its workers into
# sessions of their own and orphans change parents, so neither would find them all.
MARK = "TEST_STARTED_BY"


def processes(mark):
    """{pid: command line} of the living processes whose environment holds the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end while it is looked at; a zombie has no environment any more.
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace")
    return found


def wait_until(condition, timeout, what="the condition"):
    """Poll until condition() is true and return what it gave; fail after timeout seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s in vain for {what}"
        time.sleep(0.05)
    return value


class Job:
    """A command that runs in a session of its own; as a context manager it leaves nothing."""

    def __init__(self, cmd, cwd, env=None):
        self.mark = uuid.uuid4().hex
        self.cmd = [str(word) for word in cmd]
        # Files, as an orphan that holds a pipe open would keep its reader waiting.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            self.cmd,
            cwd=cwd,
            env={**os.environ, **(env or {}), MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self.pid = self.process.pid

    @property
    def stdout(self):
        return os.pread(self._out.fileno(), 1 << 24, 0).decode(errors="replace")

    @property
    def stderr(self):
        return os.pread(self._err.fileno(), 1 << 24, 0).decode(errors="replace")

    def processes(self):
        return processes(self.mark)

    def signal(self, number):
        os.kill(self.pid, number)

    def wait_for(self, text, timeout=180):
        """Wait until text stands in the output; fail at once if the command ends without it."""

        def seen():
            ended = self.process.poll() is not None
            if text in self.stdout + self.stderr:
                return True
            assert not ended, f"ended without {text!r}:\n{self.stdout}{self.stderr}"
            return False

        wait_until(seen, timeout, f"{text!r} in the output of {self.cmd}")

    def wait(self, timeout=240):
        """The completed command; fails if it takes longer or leaves a process behind."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{self.cmd} ran past {timeout} s:\n{self.stdout}{self.stderr}")
        # A helper such as multiprocessing's resource tracker ends a moment after its parent.
        deadline = time.monotonic() + 3
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        assert not left, f"{self.cmd} left processes behind: {left}"
        return subprocess.CompletedProcess(self.cmd, code, self.stdout, self.stderr)

    def kill(self):
        """Kill every process that the command started, wherever it went."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self.process.poll()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._out.close()
        self._err.close()


def start(cmd, cwd, env=None):
    """Start cmd and go on: with start(...) as job: job.wait_for(...), job.signal(...)."""
    return Job(cmd, cwd, env)


def run(cmd, cwd, timeout=240, env=None):
    """Run cmd to its end. Past timeout, or if it leaves a process behind, the test fails."""
    with start(cmd, cwd, env) as job:
        return job.wait(timeout)


@pytest.fixture(scope="session")
def ddp(tmp_path_factory):
    """ddp on one process, to which every strategy is compared."""
    from strategies import train
    from training import DDP

    return train(tmp_path_factory.mktemp("ddp"), DDP, 1, {"one": ""})["one"]


def need(program):
    """Skip where a program is missing; in CI, which installs all of them, fail."""
    if shutil.which(program) is None:
        message = f"{program} is not installed (tests/run.sh installs it)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)


def pytest_configure():
    # Tests start `python` and `torchrun` of the environment that runs them.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


# The files that take longest are begun first: a long one that is begun last leaves the other workers idle.
LONGEST = ["test_slurm", "test_resume", "test_pp", "test_fsdp", "test_same_numbers", "test_bad_input", "test_readme"]


def pytest_collection_modifyitems(items):
    rank = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_sessionfinish(session, exitstatus):
    # Where everything skipped, nothing was shown: that is no success.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    listing = session.config.option.collectonly
    if exitstatus == 0 and not listing and reporter and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
