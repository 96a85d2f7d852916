"""The README's first command, as it stands there: set up, train to more than 97 %, and watch it in a browser."""

import re
import shlex
import socket

import pytest
from conftest import ROOT, need, run, start, wait_until
from training import scalars, status

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder where the README's first command was run, and what it printed."""
    folder = tmp_path_factory.mktemp("first run")
    command = re.search(r"## Two commands\n\n```bash\n(.*)\n```", README)[1]
    words = [str(ROOT / word) if (ROOT / word).exists() else word for word in shlex.split(command)]
    done = run(words, folder, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_first_command_trains_to_97_percent(first_run):
    folder, said = first_run
    (directory,) = (folder / "runs").iterdir()
    assert status(directory)["status"] == "finished"
    right, images = map(int, re.search(r"finished after step 264: .*\((\d+)/(\d+)\)", said).groups())
    assert images == 359 and right / images >= 0.97, said
    assert scalars(directory)["eval/top1"][-1] == (264, pytest.approx(right / images))
    for fact in ("2 x cpu", "64 = 2 processes x 32 x 1", "11.2 M", "1438 + 359 images", "tensorboard --logdir runs"):
        assert fact in said or "cuda" in said, fact
    for word in ("data", "step", "evaluation", "checkpoint", "GiB"):
        assert word in said[said.index("finished after") :]


def test_browser_shows_curves(first_run, tmp_path):
    need("chromium")
    folder, _ = first_run
    command = shlex.split(re.search(r"`(tensorboard --logdir runs)`", README)[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    missing = {"eval/top1", "eval/wrong", "train/loss", "train/input", "speed/images_per_second"}
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    quiet = "--no-first-run --disable-sync --disable-background-networking --disable-component-update"
    dump = f"--window-size=900,4000 --virtual-time-budget=30000 --dump-dom http://127.0.0.1:{port}"
    words = [*browser, *quiet.split(), *f"{dump}/?tagFilter=top1|wrong|loss|input|images#timeseries".split()]
    with start([*command, "--port", str(port)], folder) as server:

        def drawn():
            """TensorBoard fills in the cards one by one, and a page that comes too early has only some."""
            page = run(words, tmp_path, timeout=120).stdout
            missing.difference_update([tag for tag in missing if tag in page])
            return not missing

        wait_until(lambda: f":{port}" in server.stdout + server.stderr, 60, "TensorBoard to listen")
        wait_until(drawn, 200, f"{missing} in the page")
        server.kill()
