"""The trainer: reproducible, resumable after SIGKILL, honest in its counts."""
import io
import json
import math
import os
import random
import signal
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import save_npz

from tce_nb import LOSSES, NOISES, training, transition_matrix
from tce_nb.data import Images, first_per_class, load
from tce_nb.noise import noise_file
from tce_nb.resnet import ResNet
from tce_nb.training import (
    CheckpointError, Config, NoGPU, Run, _allow_tf32, _precision, calibration_error, check_look_alikes, device_name,
    drops, evaluate, identity, load_checkpoint, make_task, pick_device, predict, prepare, preset, report,
    save_checkpoint, stream, surroundings, train, write_whole)

TINY = Config(train_per_class=8, test_per_class=4, batch_size=16, depth=8,
              epochs=5, eta=0.4, hold_out=0.1, device="cpu")
CLOCK = ("seconds", "images_per_second")


def numbers(history):
    "The history without the clock"
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in history]


@pytest.fixture(scope="module")
def undisturbed():
    return train(TINY)


def test_the_same_configuration_gives_the_same_history(undisturbed):
    torch.manual_seed(123)
    torch.rand(5)
    again = train(TINY)
    assert numbers(again.history) == numbers(undisturbed.history)
    assert all(map(torch.equal, again.net.state_dict().values(), undisturbed.net.state_dict().values()))


@pytest.mark.parametrize("change", [
    dict(seed=1), dict(loss="ce"), dict(alpha=1.0), dict(eta=0.0), dict(lr=0.05), dict(momentum=0.0),
    dict(weight_decay=0.0), dict(batch_size=8), dict(noise="uniform_excluding_true"),
    dict(milestones=(2,)), dict(depth=14), dict(hold_out=0.2), dict(precision="bfloat16"),
    dict(train_per_class=7), dict(test_per_class=3), dict(hold_out_noisy=False)], ids=str)
def test_every_field_reaches_the_training(undisturbed, change):
    base = replace(TINY, epochs=2, milestones=(9,))
    other, base = train(replace(base, **change)), train(base)
    assert numbers(other.history) != numbers(base.history)


def test_streams_are_independent():
    tasks = [make_task(replace(TINY, **change)) for change in (
        {}, dict(eta=0.0), dict(loss="ce"), dict(hold_out=0.0))]
    assert torch.equal(tasks[0].held, tasks[1].held) and torch.equal(tasks[0].held, tasks[2].held)
    assert torch.equal(tasks[0].noisy.labels, tasks[3].noisy.labels)
    first, second = (prepare(replace(TINY, eta=eta)).net.state_dict() for eta in (0.0, 0.4))
    assert all(map(torch.equal, first.values(), second.values()))


def test_the_hold_out_is_as_noisy_as_the_rest_unless_told_otherwise():
    for noisy in (True, False):
        parts = prepare(replace(TINY, eta=1.0, hold_out=0.5, hold_out_noisy=noisy))
        labels = parts.evaluated["val"][1]
        true = parts.task.noisy.true_labels[parts.task.held]
        assert torch.equal(labels, true) != noisy
    assert len(parts.train) + len(parts.evaluated["val"][0]) == 80


def test_history_has_what_was_promised(undisturbed):
    for row in undisturbed.history:
        assert set(row) == {
            "epoch", "lr", "train_loss", "train_accuracy", "clean_accuracy", "memorised", "corrected",
            "val_accuracy", "val_nll", "val_ece", "test_accuracy", "test_nll", "test_ece", *CLOCK}
    assert [row["lr"] for row in undisturbed.history] == pytest.approx([.1, .01, .001, .001, .001])
    assert 0 < undisturbed.wrong_rate < 0.4
    assert "val_accuracy" not in train(replace(TINY, hold_out=0, epochs=1)).history[0]
    clean = train(replace(TINY, eta=0.0, epochs=1)).history[0]
    assert clean["memorised"] is None and clean["corrected"] is None and clean["clean_accuracy"] == clean["train_accuracy"]


def test_the_counts_of_an_epoch_are_right(monkeypatch):
    "Against a slow recount of every batch's predictions"
    seen = []
    parts = prepare(TINY)
    original = parts.model.forward
    def watch(x):
        logits = original(x)
        seen.append(logits.detach().argmax(1))
        return logits
    parts.model.forward = watch
    row = training.train_epoch(parts, TINY, 1)
    order = torch.cat([i for _, i in training.epoch_batches(
        parts.train, 16, stream(0, "batches", 1))])
    predicted = torch.empty_like(parts.labels)
    predicted[order] = torch.cat(seen)
    wrong = parts.wrong
    assert row["train_accuracy"] == pytest.approx((predicted == parts.labels).double().mean().item())
    assert row["clean_accuracy"] == pytest.approx((predicted == parts.labels)[~wrong].double().mean().item())
    assert row["memorised"] == pytest.approx((predicted == parts.labels)[wrong].double().mean().item())
    assert row["corrected"] == pytest.approx((predicted == parts.true_labels)[wrong].double().mean().item())


def test_evaluation_against_sklearn_and_a_slow_ece():
    from sklearn.metrics import accuracy_score, log_loss
    parts = prepare(TINY)
    images, labels = parts.evaluated["test"]
    measured = evaluate(parts.net, images, labels)
    assert torch.allclose(predict(parts.net, images, batch_size=7), predict(parts.net, images), atol=1e-4)
    with torch.no_grad(): q = parts.net.eval()(images.plain(slice(None))).double().softmax(1)
    confidence, predicted = q.max(1)
    assert measured["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert measured["nll"] == pytest.approx(log_loss(labels, q.numpy(), labels=range(10)), rel=1e-5)
    ece = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap = (predicted == labels)[inside].double().mean() - confidence[inside].mean()
            ece += inside.double().mean().item() * abs(gap.item())
    assert measured["ece"] == pytest.approx(ece, abs=1e-6)


def test_calibration_error_at_its_edges():
    assert calibration_error(torch.ones(3), torch.ones(3)) == 0
    assert calibration_error(torch.zeros(3), torch.zeros(3)) == 0
    assert calibration_error(torch.tensor([0.0, 1.0]), torch.tensor([1, 0])) == 1


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
@pytest.mark.parametrize("seed", range(int(os.environ.get("TCE_KILLS", 5))))
def test_killed_at_random_moments_it_ends_the_same(tmp_path, seed):
    torch.set_num_threads(1)
    config = replace(TINY, train_per_class=4, epochs=12, seed=seed % 5)
    expected = numbers(train(config).history)
    history, resumed, kills = killed_until_done(config, tmp_path/"run.pt", random.Random(seed), longest=1.0)
    assert numbers(history) == expected
    assert 1 <= kills and resumed <= kills
    assert {p.name for p in tmp_path.iterdir()} <= {"run.pt", "run.pt.tmp", "run.json"}


def test_killed_while_writing_a_checkpoint_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path/"run.pt"
    save_checkpoint(path, {"config": {}, "old": True})
    before = path.read_bytes()
    def disk_full(descriptor): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError): save_checkpoint(path, {"new": True})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_checkpoints_hold_tensors_and_plain_values_only(tmp_path):
    path = tmp_path/"run.pt"
    train(replace(TINY, epochs=1), checkpoint=path)
    state = torch.load(io.BytesIO(path.read_bytes()[32:]), weights_only=True)
    assert set(state) == {"identity", "history", "diverged", "resumed", "made_on", "data", "device",
                          "net", "criterion", "attributes", "scaler", "optimizer"}


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "foreign"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    path = tmp_path/"run.pt"
    train(replace(TINY, epochs=1), checkpoint=path)
    content = bytearray(path.read_bytes())
    if damage == "empty": content = b""
    if damage == "cut": content = content[:len(content) // 2]
    if damage == "flip": content[len(content) // 2] ^= 255
    if damage == "foreign": content = b"cos\nsystem\n(S'true'\ntR."
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="run.pt: not a whole checkpoint .*remove it"):
        train(replace(TINY, epochs=1), checkpoint=path)
    assert path.read_bytes() == bytes(content)


def test_a_checkpoint_is_whole_however_little_memory_there_is(tmp_path, monkeypatch):
    train(replace(TINY, epochs=1), checkpoint=tmp_path/"run.pt")
    def load(*_, **__): raise MemoryError
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):  # and not `DamagedCheckpoint`, which starts again
        train(replace(TINY, epochs=2), checkpoint=tmp_path/"run.pt")


def test_a_foreign_checkpoint_is_refused_by_field(tmp_path):
    path = tmp_path/"run.pt"
    train(replace(TINY, epochs=1), checkpoint=path)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(lr, seed differ\)"):
        load_checkpoint(path, replace(TINY, epochs=1, seed=5, lr=0.2))


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    path = tmp_path/"run.pt"
    first = train(TINY, checkpoint=path)
    monkeypatch.setattr(training, "run_epoch", lambda *_: pytest.fail("trained again"))
    assert train(TINY, checkpoint=path).history == first.history


def test_the_scaler_and_half_precision_resume_exactly(tmp_path):
    for precision in ("bfloat16", "float16"):
        config = replace(TINY, precision=precision, epochs=4)
        whole, path = train(config), tmp_path/f"{precision}.pt"
        assert math.isfinite(whole.history[-1]["train_loss"])
        parts, run = prepare(config), Run(config, [], 0.0)
        for epoch in (1, 2): run.history.append(training.run_epoch(parts, config, epoch))
        save_checkpoint(path, training._state(run, parts))
        resumed = train(config, checkpoint=path)
        assert resumed.resumed == 1 and numbers(resumed.history) == numbers(whole.history)


def test_a_diverging_run_stops_and_says_so(tmp_path):
    config = replace(TINY, loss="ce", lr=1e8, epochs=40)
    run = train(config, checkpoint=tmp_path/"run.pt")
    assert run.diverged == len(run.history) < 40 and run.finished
    assert not math.isfinite(run.history[-1]["train_loss"]) and "test_accuracy" not in run.history[-1]
    assert train(config, checkpoint=tmp_path/"run.pt").diverged == run.diverged
    text = io.StringIO()
    report(run, text)
    assert "diverged: the loss is no longer a number" in text.getvalue()


def test_progress_is_one_live_line_on_a_terminal_and_plain_elsewhere(undisturbed):
    class Terminal(io.StringIO):
        def isatty(self): return True
    for kind, live in ((Terminal, True), (io.StringIO, False)):
        text = kind()
        for n in (1, 5):
            report(Run(TINY, undisturbed.history[:n], 0.3), text)
        lines = text.getvalue()
        assert "digits tce 1.5 eta 0.4 seed 0: epoch 5/5, test" in lines and "images/s" in lines
        assert ("\r" in lines) == live and lines.count("\n") == (1 if live else 2)


@pytest.mark.parametrize("change, message", [
    (dict(loss="tec"), "loss: got 'tec', expected one of ce, mse, mae, tce"),
    (dict(noise="uniform"), "noise: got 'uniform'"),
    (dict(eta=1.2), "eta: got 1.2"), (dict(eta=math.nan), "eta: got nan"),
    (dict(alpha=-1), "alpha: got -1"), (dict(alpha="1"), "alpha: got '1'"),
    (dict(epochs=0), "epochs: got 0"), (dict(epochs=2.0), "epochs: got 2.0"),
    (dict(batch_size=0), "batch_size: got 0"), (dict(lr=-0.1), "lr: got -0.1"),
    (dict(seed="0"), "seed: got '0'"), (dict(precision="fp32"), "precision: got 'fp32'"),
    (dict(depth=9), "depth: got 9, expected 6n + 2"), (dict(depth="20"), "depth: got '20', expected an int"),
    (dict(milestones=5), "milestones: got 5"), (dict(milestones=(-3,)), "milestones: got (-3,)"),
    (dict(compile="no"), "compile: got 'no', expected True or False"),
    (dict(hold_out_noisy="false"), "hold_out_noisy: got 'false'"),
    (dict(train_per_class=2.5), "train_per_class: got 2.5"), (dict(train_per_class=-1), "train_per_class: got -1"),
    (dict(hold_out=1.5), "hold_out: got 1.5"), (dict(hold_out=True), "hold_out: got True"),
    (dict(momentum=5), "momentum: got 5"), (dict(dataset=None), "dataset: got None"),
    (dict(device="gpu"), "device: got 'gpu', expected auto, cpu, cuda"), (dict(loss=["ce"]), "loss: got ['ce']"),
])
def test_an_impossible_configuration_is_refused(change, message):
    with pytest.raises(ValueError) as error: Config(**change)
    assert str(error.value).startswith(message)


def test_numpy_numbers_and_lists_become_plain_values(tmp_path):
    import numpy as np
    config = replace(TINY, eta=np.float64(0.4), seed=np.int64(0), milestones=[2, 3], epochs=np.int32(5))
    assert config == replace(TINY, milestones=(2, 3)) and hash(config) == hash(replace(TINY, milestones=(2, 3)))
    assert type(config.eta) is float and type(config.seed) is int
    train(config, checkpoint=tmp_path/"run.pt")
    assert train(config, checkpoint=tmp_path/"run.pt").resumed == 0


@pytest.mark.parametrize("epochs", range(1, 40))
def test_every_length_starts_at_the_full_rate_and_drops_twice_at_most(epochs):
    config = Config(epochs=epochs)
    rates = [training.learning_rate(config, epoch) for epoch in range(1, epochs + 1)]
    assert rates[0] == 0.1 and rates == sorted(rates, reverse=True)
    if epochs >= 4: assert len(set(rates)) == 3


def test_weights_that_blow_up_after_the_last_batch_are_noticed():
    run = train(replace(TINY, lr=1e30, batch_size=128, epochs=2))
    assert run.diverged == 1 and "test_accuracy" not in run.history[0]


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    import numpy as np
    from tce_nb.data import ARRAYS, load
    arrays = {name: getattr(load("digits"), name).numpy() for name in ARRAYS}
    np.savez(tmp_path/"x.npz", **arrays)
    config = replace(TINY, dataset=str(tmp_path/"x.npz"), epochs=1)
    train(config, checkpoint=tmp_path/"run.pt")
    arrays["train_images"] = 255 - arrays["train_images"]
    np.savez(tmp_path/"x.npz", **arrays)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(dataset differ\)"):
        train(config, checkpoint=tmp_path/"run.pt")


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

class First(nn.Module):
    "The same, of a buffer that is not there before the first batch"

    def forward(self, input, target):
        if not hasattr(self, "seen"): self.register_buffer("seen", torch.ones(input.shape[1]))
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

class Number(nn.Module):
    def forward(self, input, target): return 1.5

class Constant(nn.Module):
    def forward(self, input, target): return torch.ones(())
"""


@pytest.mark.parametrize("name", ["Fading", "Late", "First", "Counting", "Drawing"])
def test_a_loss_of_ones_own_resumes_with_its_state_and_only_as_it_was(tmp_path, name):
    (tmp_path/"mine.py").write_text(OWN_LOSS.replace("POWER", "1.0"))
    config = replace(TINY, loss=f"{tmp_path}/mine.py:{name}", epochs=4)
    whole, path = train(config), tmp_path/"run.pt"
    parts, run = prepare(config), Run(config, [], 0.0)
    for epoch in (1, 2): run.history.append(training.run_epoch(parts, config, epoch))
    save_checkpoint(path, training._state(run, parts))
    assert numbers(train(config, checkpoint=path).history) == numbers(whole.history)
    save_checkpoint(path, training._state(run, parts))
    (tmp_path/"mine.py").write_text(OWN_LOSS.replace("POWER", "2.0"))
    with pytest.raises(CheckpointError, match=r"belongs to another run \(loss differ\)"):
        train(config, checkpoint=path)


@pytest.mark.parametrize("name, got", [
    ("Single", r"a tensor of shape \(16,\)"), ("Number", "float"), ("Constant", "a tensor that does not depend on")])
def test_a_loss_of_ones_own_has_to_return_something_to_learn_by(tmp_path, name, got):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    with pytest.raises(TypeError, match=f"loss: returned {got}.*, expected a single number"):
        train(replace(TINY, loss=f"{tmp_path}/mine.py:{name}"))


def test_a_loss_that_draws_draws_anew_for_every_seed_and_epoch(tmp_path):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    config, drawn = replace(TINY, loss=f"{tmp_path}/mine.py:Drawing", epochs=1), []
    for seed, epoch in ((0, 1), (0, 2), (1, 1)):
        with training._randomness(replace(config, seed=seed), epoch, torch.device("cpu")):
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    parts, expected = prepare(config), torch.get_rng_state()
    training.train_epoch(parts, config, 1)
    assert torch.equal(torch.get_rng_state(), expected), "the caller's own draws are not disturbed"


def test_training_on_the_cpu_leaves_the_seeds_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded all GPUs"))
    with training._randomness(TINY, 1, torch.device("cpu")): pass


def test_a_home_directory_is_found_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_npz(tmp_path/"mine.npz")
    config = replace(TINY, dataset="~/mine.npz", epochs=1)
    assert config.dataset == str(tmp_path/"mine.npz")
    assert training.identity(config)["dataset"].startswith("sha256:")
    assert noise_file("transition:~/t.npy")[1] == str(tmp_path/"t.npy")


def test_the_commit_of_the_library_is_the_last_that_changed_it(tmp_path, monkeypatch):
    def git(*args): return subprocess.run(
        ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", *args], check=True, capture_output=True, text=True).stdout
    code, record = tmp_path/"tce_nb"/"__init__.py", tmp_path/"record.json"
    code.parent.mkdir()
    monkeypatch.setattr(training.tce_nb, "__file__", str(code))
    assert training.library_commit() is None
    git("init")
    assert training.library_commit() is None  # no commit yet
    for file in (code, record):
        file.write_text("")
        git("add", ".")
        git("commit", "-m", file.name)
    assert training.library_commit() == git("rev-parse", "--short=12", "HEAD~1").strip()
    code.write_text("# changed")
    assert training.library_commit().endswith("+changes")


def test_a_buffer_made_late_goes_to_the_device_of_the_run(tmp_path):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    criterion = training.get_loss(f"{tmp_path}/mine.py:Late")
    training._make_buffers(criterion, {"seen": torch.ones(10)}, torch.device("meta"))
    assert criterion.seen.device.type == "meta"


def test_a_probability_of_zero_is_no_divergence(tmp_path):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    run = train(replace(TINY, loss=f"{tmp_path}/mine.py:Sparse"))
    assert run.diverged is None and len(run.history) == TINY.epochs
    assert math.isinf(run.history[0]["test_nll"]) and run.history[0]["test_accuracy"] < 1


def test_the_first_step_of_a_scaler_may_be_skipped():
    "The momentum is there from the beginning; a fused step that is skipped would leave it unset"
    parts = prepare(TINY)
    assert all((state["momentum_buffer"] == 0).all() for state in parts.optimizer.state.values())
    assert len(parts.optimizer.state) == len([*parts.net.parameters()])
    assert not prepare(replace(TINY, momentum=0.0)).optimizer.state


def test_a_folder_is_no_file(tmp_path):
    (tmp_path/"set.npz").mkdir()
    with pytest.raises(training.DataError, match="dataset: got .*set.npz', which cannot be read .it is a folder"):
        training.identity(replace(TINY, dataset=str(tmp_path/"set.npz")))


def test_a_loss_with_parameters_is_refused(tmp_path):
    (tmp_path/"mine.py").write_text(OWN_LOSS)
    with pytest.raises(ValueError, match="loss: mine.py:Learned has parameters, which nothing would train"):
        prepare(replace(TINY, loss=f"{tmp_path}/mine.py:Learned"))


def test_a_constant_channel_is_refused(tmp_path):
    import numpy as np
    from tce_nb.data import DataError
    images = np.random.default_rng(0).integers(256, size=(40, 3, 32, 32), dtype=np.uint8)
    images[:, 1] = 7
    labels = np.arange(40) % 4
    np.savez(tmp_path/"flat.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(DataError, match="flat: channel 1 is the same everywhere"):
        train(Config(dataset=str(tmp_path/"flat.npz"), depth=8, epochs=1))


def test_presets():
    paper = preset("paper", dataset="svhn")
    assert (paper.epochs, paper.lr, paper.momentum, paper.weight_decay, paper.batch_size, paper.depth) == \
        (256, 0.1, 0.9, 1e-4, 128, 20)
    assert drops(paper) == (128, 192) and paper.train_per_class is None and paper.precision == "float32"
    assert [preset("cpu", dataset=d).epochs for d in ("cifar100", "cifar10", "mnist", "svhn")] == [40, 40, 40, 32]
    assert preset("cpu", dataset="cifar10").train_per_class == 500
    assert preset("smoke", epochs=2).epochs == 2
    with pytest.raises(ValueError, match="preset: got 'gpu', expected one of paper, cpu, digits, smoke"): preset("gpu")
    with pytest.raises(TypeError, match="etha: not a field"): preset("smoke", etha=1)


def test_a_gpu_that_is_not_there():
    if not torch.cuda.is_available():
        with pytest.raises(NoGPU, match="device: got 'cuda', but PyTorch finds no GPU"): pick_device("cuda")
    assert pick_device("auto").type in ("cpu", "cuda") and pick_device("cpu").type == "cpu"


def test_a_file_that_is_being_read_is_replaced_a_moment_later(tmp_path, monkeypatch):
    "On Windows: PermissionError until the reader has closed it"
    tries, replace_file = [], os.replace
    def busy(part, path):
        tries.append(path)
        if len(tries) < patience: raise PermissionError(13, "Access is denied")
        replace_file(part, path)
    monkeypatch.setattr(os, "replace", busy)
    patience = 5
    write_whole(tmp_path/"file", b"new")
    assert (tmp_path/"file").read_bytes() == b"new" and len(tries) == 5
    patience = math.inf
    with pytest.raises(PermissionError): write_whole(tmp_path/"file", b"newer")
    assert (tmp_path/"file").read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


@pytest.fixture
def rounding():
    "The settings of TF32 that this PyTorch has beside its old flags; all are left as they were"
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    parts = [cudnn.conv, cudnn.rnn, matmul] if hasattr(cudnn, "conv") else []
    flags, settings = (cudnn.allow_tf32, matmul.allow_tf32), [part.fp32_precision for part in parts]
    yield parts
    if parts: torch.backends.fp32_precision = "none"
    cudnn.allow_tf32, matmul.allow_tf32 = flags
    for part, setting in zip(parts, settings): part.fp32_precision = setting
    assert (cudnn.allow_tf32, matmul.allow_tf32) == flags


@pytest.mark.parametrize("allowed", [True, False])
def test_32_bits_are_not_rounded_whatever_was_set_before(rounding, allowed):
    if rounding: torch.backends.fp32_precision = "tf32"  # as a user may
    _allow_tf32(allowed)
    assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == allowed
    assert all(part.fp32_precision == ("tf32" if allowed else "ieee") for part in rounding)
    _precision(TINY, torch.device("cpu"))  # 32 bits
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert {part.fp32_precision for part in rounding} <= {"ieee"}


def test_a_run_on_a_gpu_names_its_host_too(monkeypatch):
    assert "cpu" not in surroundings(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    made_on = surroundings(torch.device("cuda"))
    assert made_on["hardware"] == "a GPU" and made_on["cpu"] == device_name(torch.device("cpu"))
    assert made_on["versions"]["cudnn"] == "92000" and made_on["cpu_capability"]


def test_a_network_is_examined_in_the_precision_of_its_run(undisturbed):
    from tce_nb.records import examine
    run = train(replace(TINY, precision="bfloat16", epochs=2))
    images = Images(run.task.data.test_images, run.task.mean, run.task.std)
    with run.autocast: half = predict(run.net, images)
    whole, true = predict(run.net, images), torch.nn.functional.one_hot(run.task.data.test_labels, 10)
    briers = [(logits.softmax(1) - true).square().sum(1).double().mean().item() for logits in (half, whole)]
    assert examine(run)["brier"] == briers[0] != briers[1]
    with undisturbed.autocast: assert not torch.is_autocast_enabled("cpu")


def test_weight_decay_reaches_every_parameter():
    parts = prepare(TINY)
    group, = parts.optimizer.param_groups
    assert group["nesterov"] and group["dampening"] == 0 and group["weight_decay"] == 1e-4
    assert len(group["params"]) == len(list(parts.net.parameters()))


def test_images_per_second_and_seconds_are_measured():
    start = time.perf_counter()
    run = train(replace(TINY, epochs=2))
    passed = time.perf_counter() - start
    assert 0 < sum(row["seconds"] for row in run.history) < passed
    for row in run.history:  # of the training alone; the rest of an epoch is looking
        trained_in = len(run.task.kept) / row["images_per_second"]
        assert 0 < trained_in < row["seconds"]


def test_resnet_of_other_shapes():
    for depth, channels, classes in ((8, 1, 2), (14, 4, 100), (32, 3, 10)):
        net = ResNet(classes, channels, depth)
        assert net(torch.randn(2, channels, 32, 32)).shape == (2, classes)
        assert sum(isinstance(m, (torch.nn.Conv2d, torch.nn.Linear)) for m in net.modules()) == depth


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "truncated_gce"])  # which needs a trained network
def test_every_loss_by_its_name_alone(loss):
    config = preset("smoke", loss=loss, eta=0.4, train_per_class=8, test_per_class=2, epochs=2, device="cpu")
    run = train(config)
    assert len(run.history) == 2 and run.diverged is None
    before = ResNet(10, 1, config.depth, stream(config.seed, "init"))
    assert any((a != b).any() for a, b in zip(before.parameters(), run.net.parameters()))


@pytest.mark.parametrize("noise", sorted({*NOISES} - {"class_dependent"}))
def test_every_noise_by_its_name_alone(noise):
    config = preset("smoke", noise=noise, eta=0.4, train_per_class=20, test_per_class=2)
    task = make_task(config)
    assert 0.1 < task.noisy.wrong_rate < 0.5
    assert make_task(config).fingerprint == task.fingerprint != make_task(replace(config, seed=1)).fingerprint


def test_forward_correction_is_told_the_noise():
    config = preset("smoke", loss="forward", noise="pair_flip", eta=0.4, train_per_class=10, test_per_class=2,
                    device="cpu")
    parts = prepare(config)
    assert torch.allclose(parts.criterion.transition.double(), transition_matrix(parts.task.noisy, 10))


def test_forward_correction_trains_without_a_class(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(30, 1, 32, 32), dtype=np.uint8), np.arange(30) % 3
    labels[labels == 2] = 3  # nobody is of class 2
    np.savez(tmp_path/"gap.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    run = train(preset("smoke", dataset=str(tmp_path/"gap.npz"), train_per_class=None, test_per_class=None,
                       loss="forward", eta=0.4, epochs=1))
    assert not run.diverged


def test_human_labels_of_a_subset_are_those_of_its_images(tmp_path, monkeypatch):
    whole = load("digits")
    given = (whole.train_labels + 1) % 10
    np.savez(tmp_path/"people.npz", clean_label=whole.train_labels, worse_label=given)
    config = preset("smoke", noise="human:people.npz#worse_label", eta=1.0, train_per_class=7)
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    task = make_task(config)
    assert torch.equal(task.noisy.labels, given[first_per_class(whole.train_labels, 7)])
    assert torch.equal(task.noisy.true_labels, task.data.train_labels)


def test_a_noise_that_is_not_known_is_refused_at_once():
    with pytest.raises(ValueError, match="noise: got 'pair', expected one of .*did you mean"): Config(noise="pair")


def test_look_alikes_are_known_of_cifar_alone(tmp_path):
    config = Config(noise="class_dependent", eta=0.4)
    images = np.random.default_rng(0).integers(256, size=(200, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path/"cifar10.npz", train_images=images, train_labels=np.arange(200) % 10,
             test_images=images[:10], test_labels=np.arange(10))
    task = make_task(replace(config, dataset=str(tmp_path/"cifar10.npz")))
    assert 0.1 < task.noisy.wrong_rate < 0.3  # half of the classes have a look-alike
    for known in (replace(config, eta=0.0), replace(config, dataset="cifar10"), replace(config, dataset="a/cifar100.npz")):
        check_look_alikes(known)
    with pytest.raises(ValueError, match="class_dependent with digits, expected cifar10 or cifar100"): make_task(config)


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
    beside = identity(config)
    monkeypatch.chdir(tmp_path/"here")
    assert make_task(config).noisy.wrong_rate == 1 and identity(config) != beside
