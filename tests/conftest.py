"""What several tests share."""
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from tce_nb.run.records import make_record, write_record
from tce_nb.run.plan import plan
from tce_nb.run.train import Run, make_task

ROOT = Path(__file__).parents[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and so would the children
SKIP = {".venv", "_build", ".pytest_cache", ".mypy_cache", "__pycache__", ".hypothesis", "tce_nb.egg-info"}


# the same examples in every run; --hypothesis-profile=default draws new ones
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_runtest_setup():
    "A test draws the same numbers, whichever ran before it in its worker"
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    "The book first and the sweeps last: each worker begins with one half and helps the other at the end"
    place = {"test_book": 0, "test_browser": 0, "test_sweep": 2, "test_ray": 2}
    items.sort(key=lambda item: place.get(item.path.stem, 1))


def tracked_files():
    "The project's files as git knows them, whether or not committed yet"
    if not (ROOT/".git").exists(): return sorted(
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and not SKIP & set(p.parts))
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT/name).is_file()]


@pytest.fixture
def clone(tmp_path):
    "A copy of the project in a folder with a space in its name"
    folder = tmp_path/"a clone"
    for name in tracked_files():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, folder/name)
    return folder


BIN = Path(sysconfig.get_path("scripts"))
CHAPTERS = re.findall(r"(?:file|root): (\S+)", (ROOT/"_toc.yml").read_text())
TCE = [str(BIN/"tce")]
TINY = dict(train_per_class=8, test_per_class=4, epochs=12, device="cpu")
SET = ["--set", *(f"{k}={v}" for k, v in TINY.items())]
SWEEP = ["sweep", "--preset", "smoke", "--seeds", "1", "--workers", "2", *SET]
JOBS = plan("smoke", seeds=1, **TINY)


def tce(*arguments, **options):
    "Start the command in a process group of its own"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen([*TCE, *map(str, arguments)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=environment, start_new_session=True, **options)


def finish(process, code=0, timeout=300):
    "Wait for a command and check its exit code"
    said, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, said
    return said


def essence(folder):
    "What the records of a folder say, without clocks and places"
    found = {}
    for path in sorted(folder.glob("records/*.json")):
        record = json.loads(path.read_text())
        for name in ("seconds", "images_per_second"): del record["history"][name]
        found[path.stem] = {k: record[k] for k in (
            "config", "data", "history", "readings", "end", "wrong_rate", "diverged")}
    return found


def waiting_loss(folder):
    "A `--loss` that is cross entropy and, while a file `wait` is in the folder, stops at its eleventh batch"
    (folder/"waiting.py").write_text(f"""
import time
from pathlib import Path
from torch import nn

class Waiting(nn.CrossEntropyLoss):
    batches = 0

    def forward(self, *batch):
        self.batches += 1
        while self.batches > 10 and Path({str(folder/"wait")!r}).exists(): time.sleep(0.1)
        return super().forward(*batch)
""")
    return f"{folder}/waiting.py:Waiting"


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id):
    "A folder that one of the workers fills and all of them use"
    base = tmp_path_factory.getbasetemp()
    root = base if worker_id == "master" else base.parent
    def folder(name, fill):
        with FileLock(root/f"{name}.lock"):
            if not (root/f"{name}.filled").exists():
                shutil.rmtree(root/name, ignore_errors=True)
                (root/name).mkdir()
                fill(root/name)
                (root/f"{name}.filled").touch()
        return root/name
    return folder


def run_undisturbed(folder):
    "A sweep that nothing happens to"
    said = finish(tce(*SWEEP, "--results", folder))
    assert said.count(" done ") == 4 and said.count("running") == 4
    assert len(essence(folder)) == 4


@pytest.fixture(scope="session")
def undisturbed(once):
    "The records of a sweep that nothing happens to"
    return essence(once("undisturbed", run_undisturbed))


def save_npz(path, seed=0, channels=1):
    "Forty random images of two classes"
    rng = np.random.default_rng(seed)
    images = rng.integers(256, size=(40, channels, 32, 32), dtype=np.uint8)
    np.savez(path, train_images=images, train_labels=np.arange(40) % 2,
             test_images=images[:8], test_labels=np.arange(8) % 2)
    return str(path)


def make_up_digits(folder):
    "Records of the comparison on digits, with numbers made up for this test"
    for job in plan("digits", seeds=3):
        start, step = {"ce": (0.80, 0.01), "tce": (0.85, 0.02)}[job.config.loss]
        accuracy = start + step * job.config.seed
        history = [dict(epoch=epoch, test_accuracy=accuracy, val_accuracy=0.5, seconds=1.0,
                        images_per_second=1.0) for epoch in range(1, job.config.epochs + 1)]
        task = make_task(job.config)
        write_record(make_record(Run(job.config, history, task.noisy.wrong_rate, task=task)), folder)


def build_book(folder):
    "Build the book into a folder; a warning fails the build"
    shutil.copytree(ROOT/"results", folder/"results", ignore=shutil.ignore_patterns("digits-*", "work"))
    make_up_digits(folder/"results")
    result = subprocess.run(
        [str(BIN/"jupyter-book"), "build", ".", "-n", "-W", "--keep-going", "--path-output", str(folder)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "TCE_RESULTS": str(folder/"results")})
    assert result.returncode == 0, result.stdout


@pytest.fixture(scope="session")
def book(once):
    "The folder of the built pages"
    return once("book with a space", build_book)/"_build"/"html"
