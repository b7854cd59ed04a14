"""Campaigns on the label noise: its distribution, its inputs, its errors."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from tce_nb import (
    NOISES, add_noise, uniform_excluding_true, uniform_including_true)

BOTH = list(NOISES.values())


@settings(max_examples=200, deadline=None)
@given(n=st.integers(0, 300), eta=st.floats(0, 1), k=st.integers(2, 12),
       seed=st.integers(0, 2**31), name=st.sampled_from(list(NOISES)))
def test_exactly_round_eta_n_labels_are_touched(n, eta, k, seed, name):
    true_labels = torch.arange(n) % k
    noisy = add_noise(name, true_labels, eta, k, seed)
    assert noisy.touched.sum() == round(eta * n)
    assert not (noisy.wrong & ~noisy.touched).any()
    assert ((0 <= noisy.labels) & (noisy.labels < k)).all()
    assert torch.equal(noisy.true_labels, true_labels)
    assert noisy.wrong_rate == noisy.wrong.sum().item() / max(n, 1)
    if name == "uniform_excluding_true":
        assert torch.equal(noisy.wrong, noisy.touched)


@pytest.mark.parametrize("noise", BOTH)
@pytest.mark.parametrize("k", [2, 3, 10, 100])
def test_new_labels_are_uniform(noise, k):
    "Chi-squared over many seeds: the p-values themselves must be uniform"
    p_values = []
    for seed in range(60):
        noisy = noise(torch.zeros(5_000, dtype=torch.int64), 1.0, k, seed)
        counts = torch.bincount(noisy.labels, minlength=k)
        if noise is uniform_excluding_true:
            assert counts[0] == 0
            counts = counts[1:]
        if len(counts) > 1: p_values.append(stats.chisquare(counts).pvalue)
    if p_values: assert stats.kstest(p_values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("noise", BOTH)
def test_positions_are_uniform_whatever_the_label(noise):
    hits = sum(noise(torch.arange(50) % 10, 0.3, 10, seed).touched.long()
               for seed in range(4_000))
    # without replacement the counts vary less than multinomial: rescale
    statistic = ((hits - 1200) ** 2 / (4_000 * 0.3 * 0.7)).sum().item() * 49 / 50
    assert stats.chi2.sf(statistic, df=49) > 1e-4
    assert stats.chi2.cdf(statistic, df=49) > 1e-4


@pytest.mark.parametrize("eta, k", [(0.2, 10), (0.4, 10), (0.8, 10), (0.8, 100)])
def test_the_papers_noise_leaves_one_in_k_right(eta, k):
    n = 100_000
    noisy = uniform_including_true(torch.arange(n) % k, eta, k, seed=3)
    sigma = math.sqrt(eta * (1 / k) * (1 - 1 / k) / n)
    assert abs(noisy.wrong_rate - eta * (1 - 1 / k)) < 4 * sigma
    assert uniform_excluding_true(torch.arange(n) % k, eta, k, 3).wrong_rate == eta


@pytest.mark.parametrize("noise", BOTH)
def test_seeds_and_generators(noise):
    labels = torch.arange(1_000) % 10
    generator = torch.Generator().manual_seed(5)
    first = noise(labels, 0.4, 10, 5).labels
    assert torch.equal(first, noise(labels, 0.4, 10, generator).labels)
    assert not torch.equal(first, noise(labels, 0.4, 10, generator).labels)
    assert torch.equal(first, noise(labels, 0.4, 10, np.int64(5)).labels)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    noise(labels, 0.4, 10, 5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("noise", BOTH)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_come_back_as_they_came(noise, dtype):
    labels = (torch.arange(60) % 10).to(dtype).view(3, 4, 5)
    before = labels.clone()
    noisy = noise(labels, 0.5, 10, 0)
    assert noisy.labels.dtype == dtype and noisy.labels.shape == labels.shape
    assert noisy.touched.shape == labels.shape and noisy.touched.dtype == torch.bool
    assert torch.equal(labels, before)
    noisy.labels.fill_(0), noisy.true_labels.fill_(0)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("noise", BOTH)
def test_numpy_gets_the_same_noise(noise):
    labels = np.arange(100, dtype=np.int32) % 10
    labels.flags.writeable = False
    ours, theirs = noise(labels, 0.5, 10, 0), noise(torch.from_numpy(labels.copy()), 0.5, 10, 0)
    for array, tensor in ((ours.labels, theirs.labels), (ours.touched, theirs.touched)):
        assert isinstance(array, np.ndarray) and (array == tensor.numpy()).all()
    assert ours.labels.dtype == np.int32 and ours.wrong_rate == theirs.wrong_rate


LABELS = torch.tensor([0, 1, 2])
@pytest.mark.parametrize("noise", BOTH)
@pytest.mark.parametrize("change, kind, message", [
    (dict(eta=-0.1), ValueError, "eta: got -0.1, expected a number from 0 to 1"),
    (dict(eta=1.1), ValueError, "eta: got 1.1"),
    (dict(eta=math.nan), ValueError, "eta: got nan"),
    (dict(eta="0.4"), ValueError, "eta: got '0.4'"),
    (dict(eta=True), ValueError, "eta: got True"),
    (dict(num_classes=1), ValueError, "num_classes: got 1, expected an int >= 2"),
    (dict(num_classes=2.5), ValueError, "num_classes: got 2.5"),
    (dict(num_classes=2), ValueError, "labels: got class 2, expected 0 to 1"),
    (dict(labels=LABELS - 1), ValueError, "labels: got class -1, expected 0 to 9"),
    (dict(labels=LABELS.float()), TypeError, "labels: got torch.float32, expected integers"),
    (dict(labels=LABELS.bool()), TypeError, "labels: got torch.bool"),
    (dict(labels=[0, 1]), TypeError, "labels: got list, expected a Tensor or a NumPy array"),
    (dict(labels=LABELS.byte(), num_classes=300), ValueError, "num_classes: got 300, more than"),
    (dict(seed=None), TypeError, "seed: got None, expected an int of 64 bits or a torch.Generator"),
    (dict(seed=1.0), TypeError, "seed: got 1.0"),
    (dict(seed=2**64), TypeError, "seed: got 18446744073709551616, expected an int of 64 bits"),
    (dict(labels=LABELS.to(torch.complex64)), TypeError, "labels: got torch.complex64, expected integers"),
    (dict(seed=True), TypeError, "seed: got True"),
])
def test_bad_input_is_named(noise, change, kind, message):
    with pytest.raises(kind) as error:
        noise(**{"labels": LABELS, "eta": 0.4, "num_classes": 10, "seed": 0, **change})
    assert str(error.value).startswith(message)


def test_there_is_no_default_seed():
    with pytest.raises(TypeError, match="seed"):
        uniform_including_true(LABELS, 0.4, 10)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="uniform_including_true, uniform_excluding_true"):
        add_noise("symmetric", LABELS, 0.4, 10, 0)


@pytest.mark.parametrize("noise", BOTH)
@pytest.mark.parametrize("labels, k", [
    (torch.arange(256).byte(), 256), (torch.arange(128).to(torch.int8), 128),
    (np.arange(300, dtype=np.uint16), 300), (np.arange(9, dtype=">i8"), 9)])
def test_every_class_that_a_narrow_dtype_can_hold(noise, labels, k):
    noisy = noise(labels, 0.5, k, 0)
    assert noisy.labels.dtype == (labels.dtype if isinstance(labels, torch.Tensor) else labels.dtype.newbyteorder("="))
    assert 0.3 < noisy.wrong_rate <= 0.56


@pytest.mark.parametrize("noise", BOTH)
def test_the_default_device_does_not_matter(noise):
    labels = torch.arange(100) % 10
    expected = noise(labels, 0.5, 10, 0).labels
    torch.set_default_device("meta")
    try: assert torch.equal(noise(labels, 0.5, 10, 0).labels, expected)
    finally: torch.set_default_device(None)
