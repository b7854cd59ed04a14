"""Sweeps: whatever is killed, damaged or full, the records come out the same."""
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from filelock import Timeout

from conftest import BIN, JOBS, SET, SWEEP, essence, finish, save_npz, tce
from tce_nb.run.cli import _pool, make_parser
from tce_nb.run.config import Config, preset, run_name
from tce_nb.run.plan import HOLD_OUT, Job, image_counts, plan
from tce_nb.run.records import Files, lock_of, recorded
from tce_nb.run.sweep import (
    LocalPool, execute, job_message, template)


CE_JOBS = [job for job in JOBS if job.config.loss == "ce"]


def of_ce(records):
    "The records of the runs with cross entropy"
    return {name: what for name, what in records.items() if "-ce-" in name}


def test_a_finished_sweep_is_not_repeated(undisturbed, tmp_path):
    arguments = [*SWEEP, "--loss", "ce", "--results", tmp_path]
    finish(tce(*arguments))
    assert essence(tmp_path) == of_ce(undisturbed)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("records/*")}
    assert "running" not in finish(tce(*arguments))
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.glob("records/*")}
    for job in CE_JOBS:  # the notebook is the log; nothing else is left behind
        files = Files(job.name, tmp_path)
        notebook = json.loads(files.notebook.read_text())
        assert any("image/png" in str(cell.get("outputs")) for cell in notebook["cells"])
        assert not files.checkpoint.exists() and not files.progress.exists()


def alive(processes):
    "Those that are still running"
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def disturb(process, rng):
    "Kill the driver, a worker, or everything at once; True if the driver is gone"
    driver = psutil.Process(process.pid)
    workers = driver.children(recursive=True)
    what = rng.choice(["driver", "worker", "everything"])
    victims = {"driver": [driver], "worker": workers[:1], "everything": [driver, *workers]}[what]
    for victim in victims:
        try: victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess: pass
    if what == "worker": return False
    process.communicate()
    psutil.wait_procs(workers, timeout=20)
    assert alive(workers) == [], "a worker outlived its driver"
    return True


# TCE_FAULTS=20 repeats the campaign that many times
@pytest.mark.parametrize("seed", range(int(os.environ.get("TCE_FAULTS", 2))))
def test_killed_at_random_it_ends_with_the_same_records(undisturbed, tmp_path, seed):
    rng, kills = random.Random(seed), 0
    process = tce(*SWEEP, "--results", tmp_path)
    end = time.time() + 300
    while process.poll() is None and time.time() < end:
        time.sleep(rng.uniform(2, 9) if kills < 4 else 1)
        if process.poll() is None and kills < 4:
            kills += 1
            if disturb(process, rng): process = tce(*SWEEP, "--results", tmp_path)
    said = process.communicate()[0]
    if process.returncode: finish(tce(*SWEEP, "--results", tmp_path))  # a worker was killed
    assert essence(tmp_path) == undisturbed, said
    assert kills >= 2
    assert not list(tmp_path.glob("work/*.pt")) and not list(tmp_path.glob("records/*.tmp"))


def test_damaged_files_are_made_again(undisturbed, tmp_path):
    "A truncated record, rubbish in between"
    record = Files(JOBS[1].name, tmp_path).record
    record.parent.mkdir()
    record.write_text('{"schema": 1, "name": ')
    (tmp_path/"records"/f"{JOBS[2].name}.json.tmp").write_text("half a rec")
    finish(tce(*SWEEP, "--results", tmp_path))
    assert essence(tmp_path) == undisturbed


def test_a_full_disk_loses_nothing(undisturbed, tmp_path):
    "No file may grow beyond 100 kB, which is too little for a checkpoint"
    def small(): resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    arguments = [*SWEEP, "--loss", "ce", "--results", tmp_path]
    said = finish(tce(*arguments, preexec_fn=small), code=1)
    assert "File too large" in said and essence(tmp_path) == {}
    assert said.count("] failed digits-") == 2
    finish(tce(*arguments))
    assert essence(tmp_path) == of_ce(undisturbed)


def test_two_drivers_share_the_work(undisturbed, tmp_path):
    drivers = [tce(*SWEEP, "--results", tmp_path) for _ in range(2)]
    said = [finish(driver) for driver in drivers]
    assert essence(tmp_path) == undisturbed
    assert all("failed" not in text and text.count(" done ") == 4 for text in said)
    assert "elsewhere" in "".join(said), "one has seen what the other had in hand"
    for job in JOBS:  # and no one wrote over the other's log
        assert '"output_type": "error"' not in Files(job.name, tmp_path).notebook.read_text()


@pytest.fixture
def flat(tmp_path):
    "A data set without anything to learn from: its runs fail"
    path = tmp_path/"flat.npz"
    images, labels = np.zeros((40, 1, 32, 32), np.uint8), np.arange(40) % 2
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return path


def test_a_failing_run_is_told_and_the_others_go_on(flat, tmp_path):
    arguments = ["sweep", "--preset", "smoke", "--seeds", 1, "--loss", "ce", "--eta", 0.4, *SET,
                 "--dataset", flat, "digits", "--results", tmp_path]
    said = finish(tce(*arguments), code=1)
    assert said.count(" done digits-ce") == 2
    assert said.count("running flat-ce") == 1, "its next try would fail as well"
    assert "DataError: flat: channel 0 is the same everywhere" in said
    assert "its hold-out run failed" in said and "Traceback" not in said
    status = finish(tce("status", "--results", tmp_path))
    assert "other: 2 done, 1 failed\n" in status
    log = Path(status.split("log: ")[1].split("\n")[0])
    assert "the same everywhere" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(tmp_path, number):
    process = tce(*SWEEP, "--results", tmp_path)
    while not (workers := psutil.Process(process.pid).children(recursive=True)): time.sleep(0.2)
    time.sleep(4)
    process.send_signal(number)
    said = finish(process, code=130 if number == signal.SIGINT else -number)
    assert number == signal.SIGTERM or "the same command goes on from here" in said
    psutil.wait_procs(workers, timeout=10)
    assert alive(workers) == []


@pytest.mark.parametrize("scale", ["few", "short"])
def test_every_run_of_few_and_short_stands_alone(scale):
    jobs = plan(scale)
    assert len(jobs) == len({job.name for job in jobs}) and scale not in HOLD_OUT
    assert {(job.config.hold_out, job.needs) for job in jobs} == {(0.1, None)}
    assert {job.config.seed for job in jobs} == {1, 2, 3}


@pytest.mark.parametrize("arguments, message", [
    (dict(scale="papr"), "preset: got 'papr'.*did you mean paper"),
    (dict(scale="few", methods=["ce:1"]), "loss: got 'ce:1'"),
    (dict(scale="few", methods=["tce:-1"]), "alpha: got -1.0, expected a number >= 0"),
    (dict(scale="few", epoch=3), "epoch: not a field of Config.*did you mean epochs"),
])
def test_what_is_wrong_is_refused_before_anything_starts(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message): plan(**arguments)


@pytest.mark.parametrize("changes", [
    dict(train_per_class=None, test_per_class=None, epochs=1), dict(epochs=1, milestones=(1,), eta=0.0),
    dict(epochs=1, loss="ce", noise="uniform_excluding_true", hold_out=30)], ids=str)
def test_the_worker_runs_what_was_planned(tmp_path, changes):
    config = preset("smoke", **{**changes, "dataset": save_npz(tmp_path/"a set.npz"), "batch_size": 8})
    if config.train_per_class: config = replace(config, train_per_class=10, test_per_class=2)
    if config.hold_out: config = replace(config, hold_out=5)
    job = Job(config)
    assert execute(job_message(job, tmp_path/"odd name"), {"OMP_NUM_THREADS": "1"}) == ("done", "")


def test_a_file_that_has_changed_since_the_plan_counts_as_what_it_is(tmp_path):
    (tmp_path/"mine.py").write_text("from torch.nn import CrossEntropyLoss as Mine")
    job = Job(preset("smoke", loss=f"{tmp_path}/mine.py:Mine", train_per_class=8, epochs=1))
    message = job_message(job, tmp_path)
    (tmp_path/"mine.py").write_text("from torch.nn import MultiMarginLoss as Mine")
    word, reason = execute(message, {})
    assert word == "failed" and "if you have changed a file of yours since the start" in reason
    assert not recorded(job.name, tmp_path) and recorded(run_name(job.config), tmp_path)


def test_a_run_stays_out_of_the_users_history(tmp_path):
    "Many workers would get into each other's way there"
    word, _ = execute(job_message(JOBS[0], tmp_path), {"IPYTHONDIR": str(tmp_path/"ipython")})
    assert word == "done" and not list(tmp_path.rglob("history*"))


@pytest.mark.parametrize("visible, found, usable, gpus", [
    (None, 2, True, ["0", "1"]), ("3,5", 2, True, ["3", "5"]), (None, 2, False, [None] * len(os.sched_getaffinity(0)))])
def test_every_gpu_has_its_slot(monkeypatch, visible, found, usable, gpus):
    if visible: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else: monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in LocalPool().free] == gpus
    assert LocalPool(runs_per_gpu=3).slots == (6 if usable else len(gpus))


@pytest.mark.parametrize("device, shared", [("cuda:1", False), ("cpu", False), ("cuda", True), ("auto", True)])
def test_a_run_that_names_its_device_gets_no_gpu_of_the_pool(monkeypatch, device, shared):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = make_parser().parse_args(["run", "--device", device])
    slot, = _pool([Job(preset("smoke", device=device))], options).free
    assert ("CUDA_VISIBLE_DEVICES" in slot) == shared


def test_a_killed_run_is_told_and_goes_on_with_the_next_sweep(tmp_path):
    process = tce(*SWEEP, "--loss", "ce", "--results", tmp_path)
    worker = None
    while worker is None:
        worker = next(iter(psutil.Process(process.pid).children()), None)
        time.sleep(0.05)
    worker.kill()
    assert "its process ended by signal 9, without a record\n" in finish(process, code=1)
    finish(tce(*SWEEP, "--loss", "ce", "--results", tmp_path))


def test_workers_use_the_library_of_the_driver(tmp_path):
    "Not what happens to lie in the working directory"
    (tmp_path/"tce_nb").mkdir()
    (tmp_path/"tce_nb/__init__.py").write_text("raise RuntimeError('a stranger')")
    (tmp_path/"queue.py").write_text("raise RuntimeError('a stranger')")
    finish(tce("run", "--epochs", "1", "--train-per-class", "8", "--results", tmp_path, cwd=tmp_path))


def test_a_look_at_a_run_does_not_keep_it_from_starting(tmp_path):
    "Whoever looks holds the lock for a moment"
    job, over = JOBS[0], threading.Event()
    Files(job.name, tmp_path).lock.parent.mkdir(parents=True)

    def look_again_and_again():
        while not over.wait(0.3):
            with contextlib.suppress(Timeout), lock_of(job.name, tmp_path).acquire(timeout=0): over.wait(0.7)

    looking = threading.Thread(target=look_again_and_again)
    looking.start()
    try: assert execute(job_message(job, tmp_path), {}) == ("done", "")
    finally:
        over.set()
        looking.join()


def test_threads_of_all_slots_fit_the_cores():
    cores = len(os.sched_getaffinity(0))
    for threads, slots in ((1, cores), (cores, 1), (4 * cores, 1)):
        pool = LocalPool(threads=threads, share_gpus=False)
        assert pool.slots == slots and pool.free[0]["OMP_NUM_THREADS"] == str(threads)


def test_images_are_counted(tmp_path, flat):
    assert image_counts(preset("paper", dataset="svhn"), tmp_path) == (73_257, 26_032)
    assert image_counts(preset("few", dataset="cifar10"), tmp_path) == (5_000, 10_000)
    assert image_counts(Config(dataset=str(flat))) == (40, 40)


def test_files_are_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"mine.py").write_text("from torch.nn import CrossEntropyLoss as Mine")
    job, = plan("smoke", methods=["mine.py:Mine"], seeds=1)[:1]
    message, name = job_message(job, tmp_path), job.name
    assert message["folder"] == str(tmp_path)  # where a process will work, too
    (tmp_path/"mine.py").unlink()
    assert job.name == name == message["name"]  # whatever happens to the file


def test_a_run_has_a_parameter_for_every_field():
    source = json.loads(template().read_text())
    cell, = [c for c in source["cells"] if c["metadata"].get("tags") == ["parameters"]]
    names = {line.split(":")[0] for line in cell["source"]}
    assert set(job_message(JOBS[0], "results")["parameters"]) == names


def papermill(folder, *parameters, code=0):
    "Run papermill itself, as a user would, in some other folder"
    words = [word for name, value in parameters for word in ("-p", name, str(value))]
    result = subprocess.run([str(BIN/"papermill"), str(template()), "out.ipynb", "--no-progress-bar",
                             *words], cwd=folder, capture_output=True, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (result.returncode == 0) == (code == 0), result.stderr
    return result.stderr


def test_papermill_alone_makes_a_record(tmp_path):
    papermill(tmp_path, ("epochs", 2), ("eta", 0.2), ("train_per_class", 8), ("test_per_class", 4))
    config = preset("smoke", epochs=2, eta=0.2, train_per_class=8, test_per_class=4)
    assert recorded(run_name(config), tmp_path/"results")
    assert (tmp_path/"out.ipynb").exists()


@pytest.mark.parametrize("parameter, message", [
    (("epoch", 10), "parameter: got 'epoch'.*did you mean epochs\\?"),
    (("selected_epoch", 1000), "selected_epoch: got 1000, expected None or an epoch from 1 to 4"),
])
def test_papermill_alone_refuses_mistakes(tmp_path, parameter, message):
    said = papermill(tmp_path, parameter, code=1)
    assert re.search(message, said), said[-2000:]
    assert not (tmp_path/"results"/"records").exists()


def test_papermill_explains_the_parameters():
    said = subprocess.run([str(BIN/"papermill"), "--help-notebook", str(template())],
                          capture_output=True, text=True, check=True).stdout
    assert "eta: float (default 0.4)" in said and "share of labels replaced at random" in said
    assert "Unknown" not in said


def test_a_run_that_diverges_at_once_is_done(tmp_path):
    job = Job(preset("smoke", lr=1e30, train_per_class=8, test_per_class=4, epochs=2, device="cpu"))
    (tmp_path/"work").mkdir()
    assert execute(job_message(job, tmp_path), {}) == ("done", "")
    assert recorded(job.name, tmp_path) and Files(job.name, tmp_path).notebook.exists()
