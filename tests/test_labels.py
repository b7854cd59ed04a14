"""Suspicious labels, the noise estimate and calibration, against slow but obvious ways to compute the same."""
import itertools
import math
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY
from hypothesis import given
from hypothesis import strategies as st

from tce_nb.labels import (
    calibration_error, estimate_noise, label_weights, rank_labels,
    reliability, risk_coverage, score_predictions)
from tce_nb.noise import add_noise

# few distinct values, so that ties, bin edges, 0 and 1 are common
predictions = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 1 / 3, 0.5, 0.8, 1.0]), st.booleans()),
                       min_size=1, max_size=7)


def tensors(pairs):
    confidence, correct = zip(*pairs)
    return torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct)


@given(predictions, st.integers(1, 9))
def test_every_confidence_is_in_one_bin_of_equal_width(pairs, bins):
    total = 0.0
    for number in range(bins):  # bins are open to the left, but for the first
        inside = [(c, r) for c, r in pairs if number < c * bins <= number + 1 or number == c == 0]
        total += abs(sum(r - c for c, r in inside))
    assert calibration_error(*tensors(pairs), bins).item() == pytest.approx(total / len(pairs))


@given(predictions, st.integers(1, 9), st.randoms())
def test_equal_confidence_may_come_in_any_order(pairs, bins, random):
    mixed = random.sample(pairs, len(pairs))
    for a, b in zip(reliability(*tensors(pairs), bins), reliability(*tensors(mixed), bins)): assert torch.allclose(a.double(), b.double(), atol=1e-12)


@given(predictions)
def test_the_risk_is_the_mean_over_all_orders_of_ties(pairs):
    areas = []
    for order in itertools.permutations(range(len(pairs)), len(pairs)) if len(pairs) < 6 else ():
        ranked = [pairs[i] for i in order]
        if any(a[0] < b[0] for a, b in zip(ranked, ranked[1:])): continue
        wrong = np.cumsum([not right for _, right in ranked])
        areas.append((wrong / np.arange(1, len(pairs) + 1)).mean())
    coverage, risk = risk_coverage(*tensors(pairs))
    if areas: assert risk.mean().item() == pytest.approx(np.mean(areas))
    assert coverage[-1] == 1 and risk[-1].item() == pytest.approx(1 - np.mean([r for _, r in pairs]))


def test_bins_of_equal_mass_hold_everything():
    confidence, correct = torch.rand(103), torch.rand(103) < 0.5
    table = reliability(confidence, correct)
    assert table.n.sum() == 103 and table.n.max() - table.n.min() == 1
    assert (table.confidence.diff() >= 0).all() and len(pd.DataFrame(table._asdict())) == 15
    assert len(reliability(confidence[:4], correct[:4]).n) == 4  # no bin is empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_of_any_precision_are_computed_in_double(dtype):
    logits = torch.randn(50, 5).to(dtype).requires_grad_()
    labels = torch.randint(5, (50,))
    assert score_predictions(logits, labels) == score_predictions(logits.double(), labels)
    assert label_weights(logits, labels).dtype == torch.float64
    assert not label_weights(logits, labels).requires_grad


def test_a_class_that_was_ruled_out_is_the_first_suspect():
    logits = torch.tensor([[0.0, 1.0], [0.0, -math.inf], [0.0, 0.0]])
    labels = torch.tensor([1, 1, 1])
    assert label_weights(logits, labels)[1] == 0
    assert rank_labels(logits, labels).tolist() == [1, 2, 0]
    assert score_predictions(logits, labels)["nll"] == math.inf


def test_the_order_is_that_of_the_loss_and_of_the_weight():
    logits, labels = 5 * torch.randn(5000, 10), torch.randint(10, (5000,))
    order = rank_labels(logits, labels)
    assert (F.cross_entropy(logits.double(), labels, reduction="none")[order].diff() <= 0).all()
    for alpha in (0.5, 1, 2): assert (label_weights(logits, labels, alpha)[order].diff() >= 0).all()


@pytest.mark.parametrize("num_classes", [3, 10, 100])
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.8, 1.0])
def test_a_network_without_mistakes_gives_the_noise_ratio(num_classes, eta):
    labels, lower = torch.arange(20_000) % num_classes, num_classes // 2
    logits = 5 * F.one_hot(labels, num_classes) + torch.rand(20_000, num_classes)
    share = eta * lower / num_classes  # of a label among the unlikely half, read on the 10,000 sure samples
    sigma = math.sqrt(share * (1 - share) / 10_000) * num_classes / lower
    noisy = add_noise("uniform_including_true", labels, eta, num_classes, seed=0)
    guess = estimate_noise(logits, noisy.labels)
    assert guess.eta == pytest.approx(eta, abs=4 * sigma)
    assert guess.low <= guess.eta <= guess.high <= 1
    assert guess.wrong_rate == pytest.approx(noisy.wrong_rate, abs=4 * sigma)
    assert guess.disagreement == pytest.approx(noisy.wrong_rate)


def test_arrays_and_small_integers_are_taken():
    logits, labels = torch.randn(50, 4), torch.arange(50) % 4
    backwards = labels.flip(0).numpy()[::-1]
    for same in (labels.to(torch.uint8), labels.tolist(), backwards, pd.Series(labels)):
        assert torch.equal(rank_labels(logits.numpy(), same), rank_labels(logits, labels))
        assert estimate_noise(logits.numpy(), same) == estimate_noise(logits, labels)
        assert score_predictions(logits.numpy(), same) == score_predictions(logits, labels)
    assert torch.equal(rank_labels(pd.DataFrame(logits.numpy(), index=range(50, 100)), labels), rank_labels(logits, labels))
    assert len(rank_labels(torch.rand(50, 4), labels)) == 50  # of logits between 0 and 1


def test_the_mistakes_of_a_network_count_little_where_it_is_sure():
    labels = torch.randint(4, (20_000,))
    hard = torch.arange(20_000) % 2 == 0
    logits = 4 * F.one_hot(labels, 4) + torch.randn(20_000, 4)
    logits[hard] = 0.1 * torch.randn(10_000, 4)  # of one half it knows nothing, and says so
    for eta in (0.0, 0.4):
        noisy = add_noise("uniform_including_true", labels, eta, 4, seed=0)
        assert estimate_noise(logits, noisy.labels).eta == pytest.approx(eta, abs=0.02)
        assert estimate_noise(logits[hard], noisy.labels[hard]).eta > 0.95


TWO, MANY = torch.zeros(2, 3), torch.linspace(-3, 3, 400).view(40, 10).sin()


@pytest.mark.parametrize("call, message", [
    (lambda: score_predictions(TWO, torch.tensor([0, 3])), "labels: got class 3, expected 0 to 2"),
    (lambda: rank_labels(TWO[:0], torch.zeros(0).long()), "logits: got torch.float32 of shape (0, 3)"),
    (lambda: estimate_noise(TWO / 0, torch.tensor([0, 1])), "logits: got nan or inf, expected numbers, or -inf"),
    (lambda: label_weights(TWO, torch.tensor([0, 1]), -1.0), "alpha: got -1.0, expected a finite number >= 0"),
    (lambda: estimate_noise("logits", torch.tensor([0])), "logits: got str, expected a tensor or an array of numbers"),
    (lambda: estimate_noise([[0.0, 1.0]], [0]), "logits: got 2 classes, expected 3 or more"),
    (lambda: score_predictions(TWO.softmax(1), [0, 1]), "logits: got probabilities, expected their logarithms"),
    (lambda: rank_labels(MANY.softmax(1).numpy().round(2), [0] * 40), "logits: got probabilities"),
    (lambda: score_predictions(torch.randn(9, 5).softmax(1).bfloat16(), [0] * 9), "logits: got probabilities"),
])
def test_bad_input_is_named(call, message):
    with pytest.raises((ValueError, TypeError)) as refused: call()
    assert message in str(refused.value)


def test_a_record_says_what_the_network_says(tmp_path):
    from sklearn.metrics import average_precision_score
    from tce_nb.report.results import record_confidence, record_precision
    from tce_nb.run.config import preset
    from tce_nb.run.data import Images
    from tce_nb.run.records import make_record, read_record, write_record
    from tce_nb.run.train import predict, train
    run = train(preset("smoke", eta=0.4, hold_out=0.25, **{**TINY, "epochs": 3}))
    record, task = read_record(write_record(make_record(run), tmp_path)), run.task
    def logits(images): return predict(run.net, Images(images, task.mean, task.std))
    exact = score_predictions(logits(task.data.test_images), task.data.test_labels, bins=20)
    confidence, correct = record_confidence(record)  # each group is one image
    scores = {name: record["history"][f"test_{name}"][-1] for name in ("accuracy", "nll")} | dict(
        brier=record["end"]["brier"], ece=calibration_error(confidence, correct, bins=20).item())
    for name, score in scores.items(): assert score == pytest.approx(exact[name], abs=1e-5)
    assert len(confidence) == len(task.data.test_labels)
    for part, index in (("train", task.kept), ("held", task.held)):
        weights = label_weights(logits(task.data.train_images[index]), task.noisy.labels[index], alpha=1)
        expected = average_precision_score(task.noisy.wrong[index], -(100 * weights).long())  # in the record's bins
        assert record_precision(record, part) == pytest.approx(expected)


def test_the_script_that_made_the_pictures_runs(tmp_path):
    "On the embedded digits, which need no download"
    page = (ROOT/"nbs/start/find_bad_labels.md").read_text()
    script = re.search(r"^:::\{code-block\} python\n(.*?)^:::", page, re.M | re.S)[1]
    for old, new in (("cifar10", "digits"), ("per_class=1000", "per_class=12"), ("epochs=12", "epochs=2")):
        assert old in script
        script = script.replace(old, new)
    said = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.match(r"tensor\(\d+\) tensor\(\d+\)", said.splitlines()[-1])
