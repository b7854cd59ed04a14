"""The trainer: reproducible, resumable after SIGKILL, honest in its counts."""
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import save_npz

from tce_nb import LOSSES, NOISES, transition_matrix
from tce_nb.run import checkpoint, train as training
from tce_nb.run.data import DataError, Images, first_per_class, load
from tce_nb.run.records import final_summary
from tce_nb.noise import noise_file
from tce_nb.run.resnet import ResNet
from tce_nb.run.checkpoint import (
    CheckpointError, device_name, environment, save_checkpoint)
from tce_nb.run.config import Config, learning_rate, lr_milestones, run_key, preset, rng_for
from tce_nb.run.train import (
    evaluate, make_task, pick_device, predict, prepare, report, train)

TINY = Config(train_per_class=8, test_per_class=4, batch_size=16, depth=8,
              epochs=5, eta=0.4, hold_out=0.1, device="cpu")
CLOCK = ("seconds", "images_per_second")


def numbers(history):
    "The history without the clock"
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in history]


def stopped_after(epochs, config, path):
    "A whole run; its checkpoint as it was after some epochs"
    def keep(run):
        if len(run.history) == epochs: shutil.copy(path, path.with_suffix(".kept"))
    run = train(config, path, keep)
    os.replace(path.with_suffix(".kept"), path)
    return run


@pytest.fixture(scope="module")
def two_epochs():
    return numbers(train(replace(TINY, epochs=2, milestones=(9,))).history)


@pytest.mark.parametrize("change", [
    dict(seed=1), dict(loss="ce"), dict(alpha=1.0), dict(eta=0.0), dict(lr=0.05), dict(momentum=0.0),
    dict(weight_decay=0.0), dict(batch_size=8), dict(noise="uniform_excluding_true"),
    dict(milestones=(2,)), dict(depth=14), dict(hold_out=0.2), dict(optimizer="adam"),
    dict(train_per_class=7), dict(test_per_class=3), dict(hold_out_noisy=False)], ids=str)
def test_every_field_reaches_the_training(two_epochs, change):
    other = train(replace(TINY, **{"epochs": 2, "milestones": (9,), **change}))
    assert numbers(other.history) != two_epochs


def test_streams_are_independent():
    tasks = [make_task(replace(TINY, **change)) for change in (
        {}, dict(eta=0.0), dict(loss="ce"), dict(hold_out=0.0))]
    assert torch.equal(tasks[0].held, tasks[1].held) and torch.equal(tasks[0].held, tasks[2].held)
    assert torch.equal(tasks[0].noisy.labels, tasks[3].noisy.labels)
    for noisy in (True, False):  # the hold-out's labels are as noisy as the rest, unless told otherwise
        state = prepare(replace(TINY, eta=1.0, hold_out=0.5, hold_out_noisy=noisy))
        true = state.task.noisy.true_labels[state.task.held]
        assert torch.equal(state.evaluated["val"][1], true) != noisy


def test_history_has_what_was_promised(capsys):
    run = train(TINY, progress=True)
    said = capsys.readouterr().err.splitlines()  # a line for each epoch
    assert len(said) == 5 and said[4].startswith("digits-tce1.5-eta0.4-select-seed0: epoch 5/5, test") and "images/s" in said[4]
    for row in run.history:
        assert set(row) == {
            "epoch", "lr", "train_loss", "train_accuracy", "clean_accuracy", "memorised", "corrected",
            "val_accuracy", "val_nll", "val_ece", "test_accuracy", "test_nll", "test_ece", *CLOCK}
        trained_in = len(run.task.kept) / row["images_per_second"]
        assert 0 < trained_in < row["seconds"]  # the rest of an epoch is looking
    assert [row["lr"] for row in run.history] == pytest.approx([.1, .01, .001, .001, .001])
    assert 0 < run.wrong_rate < 0.4
    clean = train(replace(TINY, eta=0.0, hold_out=0, epochs=1)).history[0]
    assert clean["memorised"] is None and clean["corrected"] is None and "val_accuracy" not in clean
    assert clean["clean_accuracy"] == clean["train_accuracy"]


def test_the_counts_of_an_epoch_are_right(monkeypatch):
    "Against a slow recount of every batch's predictions"
    seen = []
    state = prepare(TINY)
    original = state.model.forward
    def watch(x):
        logits = original(x)
        seen.append(logits.detach().argmax(1))
        return logits
    state.model.forward = watch
    row = training.train_epoch(state, TINY, 1)
    order = torch.cat([i for _, i in training.epoch_batches(
        state.train, 16, rng_for(0, "batches", 1))])
    predicted = torch.empty_like(state.labels)
    predicted[order] = torch.cat(seen)
    wrong = state.wrong
    assert row["train_accuracy"] == pytest.approx((predicted == state.labels).double().mean().item())
    assert row["clean_accuracy"] == pytest.approx((predicted == state.labels)[~wrong].double().mean().item())
    assert row["memorised"] == pytest.approx((predicted == state.labels)[wrong].double().mean().item())
    assert row["corrected"] == pytest.approx((predicted == state.true_labels)[wrong].double().mean().item())


def test_evaluation_against_sklearn():
    from sklearn.metrics import accuracy_score, log_loss
    state = prepare(TINY)
    images, labels = state.evaluated["test"]
    measured = evaluate(state.net, images, labels)
    assert torch.allclose(predict(state.net, images, batch_size=7), predict(state.net, images), atol=1e-4)
    with torch.no_grad(): q = state.net.eval()(images.plain(slice(None))).double().softmax(1)
    assert measured["accuracy"] == pytest.approx(accuracy_score(labels, q.argmax(1)))
    assert measured["nll"] == pytest.approx(log_loss(labels, q.numpy(), labels=range(10)), rel=1e-5)


def killed_until_done(config, path, rng, longest):
    "Start the run again and again, killing it at random moments"
    kills, result = 0, path.with_suffix(".json")
    while True:
        child = os.fork()
        if child == 0:
            try:
                run = train(config, checkpoint=path)
                part = path.with_suffix(".part")
                part.write_text(json.dumps([run.history, run.resumed]))
                os.replace(part, result)
            finally: os._exit(0)
        end = time.monotonic() + (longest * rng.random() + 0.1 * kills if kills else 0.05)
        while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0): time.sleep(0.001)
        if result.exists(): return *json.loads(result.read_text()), kills
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1


# TCE_KILLS=100 repeats the campaign that many times
@pytest.mark.parametrize("seed", range(int(os.environ.get("TCE_KILLS", 2))))
def test_killed_at_random_moments_it_ends_the_same(tmp_path, seed):
    torch.set_num_threads(1)
    config = replace(TINY, train_per_class=4, epochs=12, seed=seed % 5)
    start = time.monotonic()
    expected = numbers(train(config).history)
    longest = time.monotonic() - start  # however busy the machine is
    history, resumed, kills = killed_until_done(config, tmp_path/"run.pt", random.Random(seed), longest)
    assert numbers(history) == expected
    assert 1 <= kills and resumed <= kills
    assert {p.name for p in tmp_path.iterdir()} <= {"run.pt", "run.pt.tmp", "run.json"}


def test_a_disk_that_is_full_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path/"run.pt"
    save_checkpoint(path, {"config": {}, "old": True})
    before = path.read_bytes()
    def disk_full(descriptor): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError): save_checkpoint(path, {"new": True})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_holds_plain_values_and_is_refused_when_damaged(tmp_path):
    config, path = replace(TINY, epochs=np.int64(1), eta=np.float64(0.4), milestones=[2, 3]), tmp_path/"run.pt"
    train(config, checkpoint=path)
    whole = path.read_bytes()
    assert set(torch.load(io.BytesIO(whole[32:]), weights_only=True)) == {
        "identity", "history", "diverged", "resumed", "made_on", "data", "device",
        "net", "criterion", "attributes", "scaler", "optimizer"}
    middle = len(whole) // 2
    for damaged in (b"", whole[:middle], whole[:middle] + b"flip" + whole[middle + 4:], b"cos\nsystem\n(S'true'\ntR."):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="run.pt: not a whole checkpoint .*remove it"):
            train(config, checkpoint=path)
        assert path.read_bytes() == damaged


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    path = tmp_path/"run.pt"
    first = train(TINY, checkpoint=path)
    monkeypatch.setattr(training, "run_epoch", lambda *_: pytest.fail("trained again"))
    assert train(TINY, checkpoint=path).history == first.history


@pytest.mark.parametrize("change", [dict(precision="float16"), dict(optimizer="adam", lr=0.01)], ids=str)
def test_the_scaler_of_half_precision_and_adam_resume_exactly(tmp_path, change):
    config, path = replace(TINY, train_per_class=4, epochs=3, **change), tmp_path/"run.pt"
    whole = stopped_after(2, config, path)
    assert math.isfinite(whole.history[-1]["train_loss"])
    resumed = train(config, checkpoint=path)
    assert resumed.resumed == 1 and numbers(resumed.history) == numbers(whole.history)


def test_a_diverging_run_stops_and_says_so(tmp_path, capsys):
    config = replace(TINY, loss="ce", lr=1e8, epochs=40)
    run = train(config, checkpoint=tmp_path/"run.pt")
    assert run.diverged == len(run.history) < 40 and run.finished
    assert not math.isfinite(run.history[-1]["train_loss"]) and "test_accuracy" not in run.history[-1]
    assert train(config, checkpoint=tmp_path/"run.pt").diverged == run.diverged
    report(run)
    assert "diverged: the loss is no longer a number" in capsys.readouterr().err
    late = train(replace(TINY, lr=1e30, batch_size=128, epochs=2))  # after the only batch
    assert late.diverged == 1 and "test_accuracy" not in late.history[0]


@pytest.mark.parametrize("change, message", [
    (dict(loss="tec"), "loss: got 'tec', expected one of ce, mse, mae, tce"),
    (dict(noise="uniform"), "noise: got 'uniform'"), (dict(eta=1.2), "eta: got 1.2"), (dict(eta=math.nan), "eta: got nan"),
    (dict(alpha=-1), "alpha: got -1"), (dict(alpha="1"), "alpha: got '1'"),
    (dict(epochs=0), "epochs: got 0"), (dict(epochs=2.0), "epochs: got 2.0"), (dict(lr=-0.1), "lr: got -0.1"),
    (dict(precision="fp32"), "precision: got 'fp32'"), (dict(depth=9), "depth: got 9, expected 6n + 2"),
    (dict(optimizer="adamw"), "optimizer: got 'adamw', expected one of sgd, adam; did you mean adam?"),
    (dict(milestones=5), "milestones: got 5"), (dict(milestones=(-3,)), "milestones: got (-3,)"),
    (dict(compile="no"), "compile: got 'no', expected True or False"), (dict(train_per_class=2.5), "train_per_class: got 2.5"),
    (dict(hold_out=1.5), "hold_out: got 1.5"), (dict(hold_out=True), "hold_out: got True"),
    (dict(momentum=5), "momentum: got 5"), (dict(dataset=None), "dataset: got None"),
    (dict(device="gpu"), "device: got 'gpu', expected auto, cpu, cuda")])
def test_an_impossible_configuration_is_refused(change, message):
    with pytest.raises(ValueError) as error: Config(**change)
    assert str(error.value).startswith(message)


def test_every_length_starts_at_the_full_rate_and_drops_twice_at_most():
    for epochs in range(1, 40):
        config = Config(epochs=epochs)
        rates = [learning_rate(config, epoch) for epoch in range(1, epochs + 1)]
        assert rates[0] == 0.1 and rates == sorted(rates, reverse=True)
        assert len(set(rates)) == 3 or epochs < 4


def test_values_become_plain(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = replace(TINY, eta=np.float64(0.4), seed=np.int64(0), milestones=[2, 3], dataset="~/mine.npz")
    assert type(config.eta) is float and type(config.seed) is int and hash(config)
    assert config.milestones == (2, 3) and config.dataset == str(tmp_path/"mine.npz")
    assert noise_file("transition:~/t.npy")[1] == str(tmp_path/"t.npy")


@pytest.mark.filterwarnings("ignore:.*no image of")
def test_a_run_is_not_resumed_on_other_data_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    config = replace(TINY, dataset="mnist", train_per_class=None, test_per_class=None, epochs=1)
    save_npz(tmp_path/"mnist.npz")
    train(config, checkpoint=tmp_path/"run.pt")
    save_npz(tmp_path/"mnist.npz", seed=1)
    with pytest.raises(CheckpointError, match="was written with other data"):
        train(config, checkpoint=tmp_path/"run.pt")


OWN_LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

class Fading(nn.Module):
    "Cross entropy, weaker from step to step"

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, input, target):
        self.steps += 1
        return F.cross_entropy(input, target) * POWER / self.steps.sqrt()

class Late(nn.Module):
    "Cross entropy, weighted by how often a class was seen so far"

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, input, target):
        if self.seen is None: self.seen = torch.ones(input.shape[1])
        self.seen += target.bincount(minlength=input.shape[1])
        return F.cross_entropy(input, target, 1 / self.seen)

class Counting(nn.Module):
    "Cross entropy, weaker from step to step, by plain attributes"

    def __init__(self):
        super().__init__()
        self.steps, self.mean = 0, torch.zeros(())

    def forward(self, input, target):
        loss = F.cross_entropy(input, target)
        self.steps, self.mean = self.steps + 1, 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.steps ** 0.5 / (1 + self.mean)

class Drawing(nn.Module):
    "Cross entropy of half the batch, drawn each time"

    def forward(self, input, target):
        kept = torch.rand(len(target)) < 0.5
        return F.cross_entropy(input, target, reduction="none")[kept].sum() / len(target)

class Sparse(nn.Module):
    "Cross entropy of a network whose probabilities may be 0"

    def forward(self, input, target): return F.cross_entropy(input, target)

    def log_prediction(self, logits, dim):
        best = logits == logits.amax(dim, keepdim=True)
        return logits.masked_fill(~best, -torch.inf)

class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

class Single(nn.Module):
    def forward(self, input, target): return F.cross_entropy(input, target, reduction="none")

class Constant(nn.Module):
    def forward(self, input, target): return torch.ones(())
"""


@pytest.mark.parametrize("name", ["Fading", "Late", "Counting", "Drawing"])
def test_a_loss_of_ones_own_resumes_with_its_state_and_only_as_it_was(tmp_path, name):
    (tmp_path/"mine.py").write_text(OWN_LOSS.replace("POWER", "1.0"))
    config, path = replace(TINY, loss=f"{tmp_path}/mine.py:{name}", epochs=3), tmp_path/"run.pt"
    whole = stopped_after(2, config, path)
    half = path.read_bytes()
    assert numbers(train(config, checkpoint=path).history) == numbers(whole.history)
    path.write_bytes(half)
    (tmp_path/"mine.py").write_text(OWN_LOSS.replace("POWER", "2.0"))
    with pytest.raises(CheckpointError, match=r"belongs to another run \(loss differ\)"):
        train(config, checkpoint=path)


@pytest.mark.parametrize("name, message", [
    ("Single", r"got torch.float32 of shape \(16,\), expected a tensor of one number that depends on the logits"),
    ("Constant", r"got torch.float32 of shape \(\), expected a tensor"), ("Learned", "got mine.py:Learned, which has parameters")])
def test_a_loss_that_nothing_can_be_learned_by_is_refused(tmp_path, name, message):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    with pytest.raises((TypeError, ValueError), match=f"loss: {message}"):
        train(replace(TINY, loss=f"{tmp_path}/mine.py:{name}"))


def test_the_commit_of_the_library_is_the_last_that_changed_it(tmp_path, monkeypatch):
    def git(*args): return subprocess.run(
        ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", *args], check=True, capture_output=True, text=True).stdout
    code, record = tmp_path/"tce_nb"/"__init__.py", tmp_path/"record.json"
    code.parent.mkdir()
    monkeypatch.setattr(checkpoint.tce_nb, "__file__", str(code))
    assert checkpoint.library_commit() is None
    git("init")
    assert checkpoint.library_commit() is None  # no commit yet
    for file in (code, record):
        file.write_text("")
        git("add", ".")
        git("commit", "-m", file.name)
    assert checkpoint.library_commit() == git("rev-parse", "--short=12", "HEAD~1").strip()
    code.write_text("# changed")
    assert checkpoint.library_commit().endswith("+changes")


def test_a_probability_of_zero_is_no_divergence(tmp_path):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    run = train(replace(TINY, loss=f"{tmp_path}/mine.py:Sparse"))
    assert run.diverged is None and len(run.history) == TINY.epochs
    assert math.isinf(run.history[0]["test_nll"]) and run.history[0]["test_accuracy"] < 1


def test_the_optimiser_holds_every_parameter_and_its_momentum():
    "From the beginning: a fused first step that a scaler skips would leave the momentum unset"
    optimizer, parameters = prepare(TINY).optimizer, len([*prepare(TINY).net.parameters()])
    group, = optimizer.param_groups
    assert group["nesterov"] and group["dampening"] == 0 and group["weight_decay"] == 1e-4
    assert len(group["params"]) == len(optimizer.state) == parameters
    assert all((state["momentum_buffer"] == 0).all() for state in optimizer.state.values())
    adam, = prepare(replace(TINY, optimizer="adam", lr=0.01)).optimizer.param_groups
    assert (adam["lr"], adam["betas"], adam["weight_decay"], len(adam["params"])) == (0.01, (0.9, 0.999), 1e-4, parameters)


def test_a_constant_channel_is_refused(tmp_path):
    images, labels = np.zeros((40, 3, 32, 32), np.uint8), np.arange(40) % 4
    images[:, ::2] = np.arange(32)
    np.savez(tmp_path/"flat.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(DataError, match="flat: channel 1 is the same everywhere"):
        train(Config(dataset=str(tmp_path/"flat.npz"), depth=8, epochs=1))


def test_presets():
    paper = preset("paper", dataset="svhn")
    assert (paper.epochs, paper.lr, paper.momentum, paper.weight_decay, paper.batch_size, paper.depth) == \
        (256, 0.1, 0.9, 1e-4, 128, 20)
    assert lr_milestones(paper) == (128, 192) and paper.train_per_class is None and paper.precision == "float32"
    assert [preset("short", dataset=d).epochs for d in ("cifar100", "cifar10", "mnist", "svhn")] == [64, 32, 16, 128]
    assert preset("few", dataset="cifar10").train_per_class == 500 and preset("few").hold_out == 0.1
    with pytest.raises(ValueError, match="preset: got 'gpu', expected one of smoke, digits, few, short, paper"): preset("gpu")
    with pytest.raises(TypeError, match="etha: not a field.* did you mean eta"): preset("smoke", etha=1)


def test_a_gpu_that_is_not_there():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: got 'cuda', but PyTorch finds no GPU"): pick_device("cuda")
    assert pick_device("auto").type in ("cpu", "cuda") and pick_device("cpu").type == "cpu"


def test_32_bits_are_not_rounded_whatever_was_set_before():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    for allowed in (True, False):
        torch.backends.fp32_precision = "none" if allowed else "tf32"  # as a user may
        training._precision(replace(TINY, precision="tf32" if allowed else "float32"), torch.device("cuda"))
        assert {part.fp32_precision for part in (cudnn.conv, cudnn.rnn, matmul)} == {"tf32" if allowed else "ieee"}


def test_a_run_on_a_gpu_names_its_host_too(monkeypatch):
    assert "cpu" not in environment(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    made_on = environment(torch.device("cuda"))
    assert made_on["hardware"] == "a GPU" and made_on["cpu"] == device_name(torch.device("cpu"))
    assert made_on["versions"]["cudnn"] == "92000" and made_on["cpu_capability"]


def test_bfloat16_is_refused_where_the_processor_has_none(monkeypatch):
    config = replace(TINY, precision="bfloat16", epochs=1)
    monkeypatch.setattr(training, "native_bfloat16", lambda: False)
    with pytest.raises(ValueError, match="precision: got 'bfloat16' on a processor without AVX512_BF16 or AMX"):
        train(config)
    monkeypatch.setattr(training, "native_bfloat16", lambda: True)
    prepare(config)


def test_a_network_is_examined_in_the_precision_of_its_run(monkeypatch):
    monkeypatch.setattr(training, "native_bfloat16", lambda: True)
    run = train(replace(TINY, train_per_class=4, precision="bfloat16", epochs=1))
    images = Images(run.task.data.test_images, run.task.mean, run.task.std)
    with run.autocast: half = predict(run.net, images)
    whole, true = predict(run.net, images), torch.nn.functional.one_hot(run.task.data.test_labels, 10)
    briers = [(logits.softmax(1) - true).square().sum(1).double().mean().item() for logits in (half, whole)]
    assert final_summary(run)["brier"] == briers[0] != briers[1]


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "truncated_gce"])  # which needs a trained network
def test_every_loss_by_its_name_alone(loss):
    config = preset("smoke", loss=loss, eta=0.4, train_per_class=4, test_per_class=2, epochs=1, device="cpu")
    run = train(config)
    assert len(run.history) == 1 and run.diverged is None
    before = ResNet(10, 1, config.depth, rng_for(config.seed, "init"))
    assert any((a != b).any() for a, b in zip(before.parameters(), run.net.parameters()))


@pytest.mark.parametrize("noise", sorted({*NOISES} - {"class_dependent"}))
def test_every_noise_by_its_name_alone(noise):
    config = preset("smoke", noise=noise, eta=0.4, train_per_class=20, test_per_class=2)
    task = make_task(config)
    assert 0.1 < task.noisy.wrong_rate < 0.5
    assert make_task(config).fingerprint == task.fingerprint != make_task(replace(config, seed=1)).fingerprint


def test_forward_correction_is_told_the_noise(tmp_path):
    config = preset("smoke", loss="forward", noise="pair_flip", eta=0.4, train_per_class=10, test_per_class=2,
                    device="cpu")
    state = prepare(config)
    assert torch.allclose(state.criterion.transition.double(), transition_matrix(state.task.noisy, 10))
    images, labels = np.random.default_rng(0).integers(256, size=(30, 1, 32, 32), dtype=np.uint8), np.arange(30) % 3
    labels[labels == 2] = 3  # nobody is of class 2
    np.savez(tmp_path/"gap.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    assert not train(replace(config, dataset=str(tmp_path/"gap.npz"), noise="uniform_including_true",
                             train_per_class=None, test_per_class=None, epochs=1)).diverged


def test_human_labels_of_a_subset_are_those_of_its_images(tmp_path, monkeypatch):
    whole = load("digits")
    given = (whole.train_labels + 1) % 10
    np.savez(tmp_path/"people.npz", clean_label=whole.train_labels, worse_label=given)
    config = preset("smoke", noise="human:people.npz#worse_label", eta=1.0, train_per_class=7)
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    task = make_task(config)
    assert torch.equal(task.noisy.labels, given[first_per_class(whole.train_labels, 7)])
    assert torch.equal(task.noisy.true_labels, task.data.train_labels)


def test_look_alikes_are_known_of_cifar_alone():
    for changes in (dict(eta=0.0), dict(dataset="cifar10", eta=0.4), dict(dataset="a/cifar100.npz", eta=0.4)):
        Config(noise="class_dependent", **changes)
    with pytest.raises(ValueError, match="class_dependent with digits, expected cifar10 or cifar100"):
        Config(noise="class_dependent", eta=0.4)


def test_a_file_of_noise_is_taken_whole_and_looked_for_here_first(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="eta: got 0.4, expected 1 to take the noise of transition:T.npy"):
        Config(noise="transition:T.npy", eta=0.4)
    config = preset("smoke", noise="transition:T.npy", eta=1.0, train_per_class=7)
    for name, matrix in (("here", np.roll(np.eye(10), 1, 1)), ("data", np.eye(10))):
        (tmp_path/name).mkdir()
        np.save(tmp_path/name/"T.npy", matrix)
    monkeypatch.setenv("TCE_DATA", str(tmp_path/"data"))
    monkeypatch.chdir(tmp_path)
    assert make_task(config).noisy.wrong_rate == 0
    beside = run_key(config)
    monkeypatch.chdir(tmp_path/"here")
    assert make_task(config).noisy.wrong_rate == 1 and run_key(config) != beside
