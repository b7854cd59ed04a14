"""Label noise: its distribution, its inputs, its files, its errors."""
import hashlib
import math
import zipfile
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from tce_nb.noise import (
    CIFAR100, CIFAR100_FLIPS, CIFAR100_SUPER_CLASSES, NOISES, NoisyLabels, add_noise,
    bare_noise, check_noise_name, class_dependent, from_transition, human, instance_dependent, noise_file, pair_flip,
    transition_matrix, uniform_excluding_true, uniform_including_true)

BOTH = [uniform_including_true, uniform_excluding_true]
COUNTED = [*BOTH, pair_flip]  # these touch round(eta * n) labels, for any number of classes


def looking_at_images(labels, eta, num_classes, seed):
    "Instance-dependent noise on made-up images, with the signature of the others"
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 4, 4), dtype=np.uint8)
    return instance_dependent(labels, eta, num_classes, seed, pixels)


def by_matrix(labels, eta, num_classes, seed):
    "A matrix that leaves `1 - eta`, with the signature of the others"
    matrix = np.full((num_classes, num_classes), eta / (num_classes - 1))
    np.fill_diagonal(matrix, 1 - eta)
    return from_transition(labels, matrix, seed)


ALL = [*COUNTED, class_dependent, looking_at_images, by_matrix]


@settings(max_examples=200)
@given(n=st.integers(0, 300), eta=st.floats(0, 1), k=st.integers(2, 12),
       seed=st.integers(0, 2**31), name=st.sampled_from([noise.__name__ for noise in COUNTED]))
def test_exactly_round_eta_n_labels_are_touched(n, eta, k, seed, name):
    true_labels = torch.arange(n) % k
    noisy = add_noise(name, true_labels, eta, k, seed)
    assert noisy.touched.sum() == round(eta * n)
    assert not (noisy.wrong & ~noisy.touched).any()
    assert ((0 <= noisy.labels) & (noisy.labels < k)).all()
    assert torch.equal(noisy.true_labels, true_labels)
    assert noisy.wrong_rate == noisy.wrong.sum().item() / max(n, 1)
    if name != "uniform_including_true":
        assert torch.equal(noisy.wrong, noisy.touched)


@pytest.mark.parametrize("noise", ALL)
def test_seeds_and_generators(noise):
    labels = torch.arange(1_000) % 10
    generator = torch.Generator().manual_seed(5)
    first = noise(labels, 0.4, 10, 5).labels
    assert torch.equal(first, noise(labels, 0.4, 10, generator).labels)
    assert not torch.equal(first, noise(labels, 0.4, 10, generator).labels)
    assert torch.equal(first, noise(labels, 0.4, 10, np.int64(5)).labels)
    state = torch.get_rng_state()
    noise(labels, 0.4, 10, 5)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("noise", [*COUNTED, class_dependent, by_matrix])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_come_back_as_they_came(noise, dtype):
    labels = (torch.arange(60) % 10).to(dtype).view(3, 4, 5)
    before = labels.clone()
    noisy = noise(labels, 0.5, 10, 0)
    assert noisy.labels.dtype == dtype and noisy.labels.shape == labels.shape
    assert noisy.touched.shape == labels.shape and noisy.touched.dtype == torch.bool
    assert torch.equal(labels, before)
    noisy.labels.fill_(0), noisy.true_labels.fill_(0)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("noise", ALL)
def test_arrays_and_lists_get_the_same_noise(noise):
    labels = np.arange(100, dtype=np.int32) % 10
    labels.flags.writeable = False
    ours, theirs = noise(labels, 0.5, 10, 0), noise(torch.from_numpy(labels.copy()), 0.5, 10, 0)
    for array, tensor in ((ours.labels, theirs.labels), (ours.touched, theirs.touched)):
        assert isinstance(array, np.ndarray) and (array == tensor.numpy()).all()
    assert ours.labels.dtype == np.int32 and ours.wrong_rate == theirs.wrong_rate
    assert torch.equal(noise(labels.tolist(), 0.5, 10, 0).labels, theirs.labels.long())


def test_labels_of_any_shape_and_a_row_for_each_class_or_not():
    assert pair_flip(torch.tensor(3), 1.0, 10, 0).labels == 4
    two = torch.tensor([[0, 1], [1, 0], [0, 1]])  # of two classes, these are no one-hot rows
    assert torch.equal(pair_flip(two, 1.0, 2, 0).labels, 1 - two)


LABELS = torch.tensor([0, 1, 2])
@pytest.mark.parametrize("change, kind, message", [
    (dict(eta=-0.1), ValueError, "eta: got -0.1, expected a number from 0 to 1"),
    (dict(eta="0.4"), TypeError, "eta: got '0.4'"),
    (dict(num_classes=1), ValueError, "num_classes: got 1, expected an int >= 2"),
    (dict(num_classes=2), ValueError, "labels: got class 2, expected 0 to 1"),
    (dict(labels=LABELS - 1), ValueError, "labels: got class -1, expected 0 to 9"),
    (dict(labels=LABELS.float()), TypeError, "labels: got torch.float32, expected integers"),
    (dict(labels=np.array(["cat", "dog"])), ValueError, "labels: got ndarray, expected a tensor or an array of numbers"),
    (dict(labels=torch.tensor([1, 10])), ValueError, "labels: got class 10, expected 0 to 9 (do they count from 1?)"),
    (dict(labels=torch.eye(10).long()), ValueError, "labels: got one-hot rows, (10, 10), expected class indices: labels.argmax(1)"),
    (dict(seed=None), TypeError, "seed: got None, expected an int or a torch.Generator"),
])
def test_bad_input_is_named(change, kind, message):
    with pytest.raises(kind) as error:
        pair_flip(**{"labels": LABELS, "eta": 0.4, "num_classes": 10, "seed": 0, **change})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("noise", ALL)
def test_the_default_device_does_not_matter(noise):
    labels = torch.arange(100) % 10
    expected = noise(labels, 0.5, 10, 0).labels
    torch.set_default_device("meta")
    try: assert torch.equal(noise(labels, 0.5, 10, 0).labels, expected)
    finally: torch.set_default_device(None)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, dtype=np.int64).tobytes()).hexdigest()[:16]


def test_the_noise_of_committed_records_has_not_changed():
    "Of the labels in every record that was ever written, drawn before the other kinds existed"
    labels = torch.arange(50_000) % 10
    drawn = [digest(noise(labels, eta, 10, seed).labels) for noise in BOTH for eta, seed in ((0.4, 0), (0.8, 7))]
    assert drawn == ["4d5d9c292f74bcd7", "e74c54a5a2502630", "9dc5f24937e76239", "a3f8d6ff8d310f10"]


# --- Transition matrices

@given(k=st.integers(2, 7), pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_the_transition_matrix_counts(k, pairs):
    old, new = np.array(pairs, dtype=np.int64).reshape(-1, 2).T % k
    matrix = transition_matrix(NoisyLabels(new, old, old != new), k)
    seen, classes = Counter(zip(old.tolist(), new.tolist())), Counter(old.tolist())
    assert matrix.shape == (k, k) and matrix.dtype == np.float64
    for i in range(k):
        assert matrix[i].sum() == (pytest.approx(1) if classes[i] else 0)
        for j in range(k): assert matrix[i, j] == seen[i, j] / max(1, classes[i])


@pytest.mark.parametrize("noise", ALL)
def test_no_noise_and_no_labels(noise):
    labels = torch.arange(200) % 10
    none = noise(labels, 0.0, 10, 0)
    assert torch.equal(none.labels, labels) and none.wrong_rate == 0
    assert none.touched.all() if noise is by_matrix else not none.touched.any()
    empty = noise(labels[:0], 0.5, 10, 0)
    assert empty.labels.shape == (0,) and empty.wrong_rate == 0


# --- Look-alikes

COARSE = [  # the coarse label of each fine label in the data set's own files
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15,
    0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19,
    18, 1, 2, 15, 6, 0, 17, 8, 14, 13]


def test_the_circles_of_cifar100():
    ours = {CIFAR100.index(name): number for number, five in enumerate(CIFAR100_SUPER_CLASSES) for name in five}
    assert [ours[label] for label in range(100)] == COARSE
    assert Counter(COARSE) == {number: 5 for number in range(20)}
    assert sorted(CIFAR100_FLIPS) == sorted(CIFAR100_FLIPS.values()) == list(range(100))
    for number in range(20):
        five = [label for label in range(100) if COARSE[label] == number]
        assert [CIFAR100_FLIPS[label] for label in five] == five[1:] + five[:1]


def test_a_map_of_your_own():
    labels = np.arange(700) % 7
    noisy = class_dependent(labels, 1.0, 7, 0, flips={np.int64(2): 5, 5: 2})
    assert {*zip(labels[noisy.wrong].tolist(), noisy.labels[noisy.wrong].tolist())} == {(2, 5), (5, 2)}
    assert noisy.wrong.sum() == 200 and noisy.touched.all()
    for flips, message in ((None, "num_classes: got 7, expected 10 or 100 as in CIFAR, or a map"),
                           ({2: 7}, "flips: got {2: 7}, expected classes from 0 to 6")):
        with pytest.raises(ValueError, match=message): class_dependent(labels, 0.4, 7, 0, flips)


# --- Matrices

@pytest.mark.parametrize("matrix, message", [
    ([[1.0, 0.0]], "matrix: got shape (1, 2), expected K x K with K >= 2"),
    ([[1.0]], "matrix: got shape (1, 1)"), (np.eye(3)[None], "matrix: got shape (1, 3, 3)"),
    ([[1.0, 0.0], [0.6, 0.6]], "matrix: got row 1 with the smallest entry 0.6 and the sum 1.2, expected entries >= 0 that sum to 1"),
    ([[1.5, -0.5], [0.0, 1.0]], "matrix: got row 0 with the smallest entry -0.5 and the sum 1"),
    ([[math.nan, 1.0], [0.0, 1.0]], "matrix: got row 0 with the smallest entry nan and the sum nan"),
    ("eye", "matrix: got str, expected a tensor or an array of numbers"),
])
def test_a_matrix_that_is_none(matrix, message):
    with pytest.raises(ValueError) as error: from_transition(torch.tensor([0, 1]), matrix, 0)
    assert str(error.value).startswith(message)


def test_rows_that_sum_to_almost_one_never_leave_the_classes():
    "The sum of ten tenths is below 1; the highest draw must not fall off the end"
    row = [0.1] * 10 + [0.0]
    noisy = from_transition(torch.zeros(200_000, dtype=torch.int64), [row] * 11, 0)
    assert noisy.labels.max() == 9
    assert stats.chisquare(torch.bincount(noisy.labels)).pvalue > 1e-4


# --- Images

def slowly(labels, eta, num_classes, seed, images):
    "Where each image would go, one at a time, from the same random numbers"
    generator = torch.Generator().manual_seed(seed)
    level, coin = (torch.rand(len(labels), generator=generator, dtype=torch.float64).numpy() for _ in range(2))
    rates = stats.truncnorm.ppf(level, -eta / 0.1, (1 - eta) / 0.1, loc=eta, scale=0.1)
    pixels = images.reshape(len(images), -1).astype(np.float64)
    pixels = (pixels - pixels.mean()) / pixels.std()
    projections = [torch.randn(pixels.shape[1], num_classes, generator=generator, dtype=torch.float64).numpy()
                   for _ in range(num_classes)]
    chances = []
    for x, label in zip(pixels, labels):
        score = np.exp((logit := x @ projections[label]) - np.delete(logit, label).max())
        score[label] = 0
        chances.append(score / score.sum())
    levels = iter(torch.rand(int((coin < rates).sum()), generator=generator, dtype=torch.float64).tolist())
    return [int(label) if coin[n] >= rates[n] else int(np.searchsorted(chances[n].cumsum(), next(levels), "right"))
            for n, label in enumerate(labels)]


@pytest.mark.parametrize("eta", [0.05, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("scale", [1, 20])
def test_all_images_at_once_are_the_images_one_by_one(eta, scale):
    rng = np.random.default_rng(3)
    images, labels = rng.integers(0, 256, (300, 1, 3, 3), dtype=np.uint8), rng.integers(0, 5, 300)
    images[1:] //= scale  # an outlier makes the others alike, and the softmax soft
    assert instance_dependent(labels, eta, 5, 4, images).labels.tolist() == slowly(labels, eta, 5, 4, images)


def test_images_of_every_kind_are_the_same_images():
    images = torch.randint(0, 256, (60, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(60) % 10
    noise = partial(instance_dependent, labels, 0.5, 10, 0)
    before, expected = images.clone(), noise(images).labels
    for same in (images.numpy(), images.float(), images.double().numpy(), images.numpy()[:, ::-1][:, ::-1],
                 images.flatten(1), (images.double() - 100) / 50):
        assert torch.equal(noise(same).labels, expected)
    assert torch.equal(images, before)
    assert noise(torch.zeros(60, 4)).wrong.any(), "an image of one colour can still be mistaken"


@pytest.mark.parametrize("change, kind, message", [
    (dict(images=None), ValueError, "images: got NoneType, expected a tensor or an array of numbers"),
    (dict(images=torch.zeros(2, 4)), ValueError, "images: got shape (2, 4) for labels of shape (3,)"),
    (dict(images=torch.zeros(3)), ValueError, "images: got shape (3,)"),
    (dict(labels=LABELS[:, None]), ValueError, "images: got shape (3, 4) for labels of shape (3, 1)"),
    (dict(eta=1.1), ValueError, "eta: got 1.1"),
])
def test_images_that_do_not_fit(change, kind, message):
    fine = dict(labels=LABELS, eta=0.4, num_classes=10, seed=0, images=torch.rand(3, 4))
    with pytest.raises(kind) as error: instance_dependent(**{**fine, **change})
    assert str(error.value).startswith(message)


# --- People

CLEAN = np.arange(50) % 10
GIVEN = (CLEAN + (np.arange(50) % 3 == 0)) % 10


def published(kind=np.int64):
    "The layout of CIFAR-10N's file"
    return {"clean_label": CLEAN.astype(kind), "worse_label": GIVEN.astype(kind), "random_label1": CLEAN.astype(kind)}


def as_numpy_1(path):
    "What NumPy 1 called its modules: the published files were saved with it"
    with zipfile.ZipFile(path) as file: parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items(): file.writestr(name, data.replace(b"numpy._core", b"numpy.core"))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@pytest.mark.parametrize("form", ["npz", "pt", "pt of NumPy 1", "legacy pt", "pt of tensors", "pt of lists"])
def test_human_labels_are_read(form, dtype, tmp_path):
    arrays, path = published(dtype), tmp_path/f"people.{'npz' if form == 'npz' else 'pt'}"
    if "tensors" in form: arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if "lists" in form: arrays = {name: array.tolist() for name, array in arrays.items()}
    if form == "npz": np.savez(path, **arrays)
    else: torch.save(arrays, path, _use_new_zipfile_serialization="legacy" not in form)
    if "NumPy 1" in form: as_numpy_1(path)
    for labels in (CLEAN, torch.from_numpy(CLEAN).byte()):
        noisy = human(path, labels, "worse_label")
        assert type(noisy.labels) is type(labels) and noisy.labels.dtype == labels.dtype
        assert noisy.labels.tolist() == GIVEN.tolist() and noisy.true_labels.tolist() == CLEAN.tolist()
        assert noisy.touched.all() and noisy.wrong.sum() == 17
    assert human(str(path), CLEAN, "random_label1").wrong_rate == 0


class Bomb:
    "Leaves a file behind if it is ever rebuilt"
    def __init__(self, path): self.path = path
    def __reduce__(self): return open, (str(self.path), "w")


@pytest.mark.parametrize("noise", ["human:people.pt#worse_label", "human:people.npz#worse_label", "transition:people.npy"])
def test_a_file_that_could_run_a_program_is_refused(noise, tmp_path):
    arrays = {**published(), "more": Bomb(tmp_path/"exploded")}
    torch.save(arrays, tmp_path/"people.pt")
    np.savez(tmp_path/"people.npz", **{n: np.array(a, dtype=object) for n, a in arrays.items()})
    np.save(tmp_path/"people.npy", arrays, allow_pickle=True)
    with pytest.raises(ValueError, match="people.*not a safe .npy, .npz or .pt file.*numpy.savez"):
        add_noise(noise, CLEAN, 1, 10, 0, root=tmp_path)
    assert not (tmp_path/"exploded").exists()


def write(path, **arrays):
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize("labels, changes, column, message", [
    (CLEAN[:40], {}, "worse_label", "labels: got 40 that are not its clean_label, expected the 50 of {path}, in the same order"),
    (np.roll(CLEAN, 1), {}, "worse_label", "labels: got 50 that are not its clean_label"),
    (CLEAN, {}, "worst_label", "{path}: column: got 'worst_label', expected one of clean_label, worse_label, random_label1; did you mean worse_label?"),
    (CLEAN, dict(worse_label=GIVEN[:9]), "worse_label", "labels: got 50 that are not its clean_label"),
    (CLEAN, dict(worse_label=GIVEN + 1), "worse_label", "labels: got class 10, expected 0 to 9"),
])
def test_human_labels_of_other_images_are_refused(labels, changes, column, message, tmp_path):
    path = write(tmp_path/"people.npz", **{**published(), **changes})
    with pytest.raises((ValueError, TypeError)) as error: human(path, labels, column)
    assert str(error.value).startswith(message.format(path=path))


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.pt"): human(tmp_path/"none.pt", CLEAN, "worse_label")
    for name, data in ("cut.npz", b"PK"), ("cut.pt", b"PK"), ("empty.pt", b""), ("people.csv", b"0,1"):
        (tmp_path/name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: not a safe"): human(tmp_path/name, CLEAN, "worse_label")


# --- By name

@pytest.mark.parametrize("name, meant", [
    ("uniform_including", "uniform_including_true"), ("pair", "pair_flip"), ("Pair_Flip", "pair_flip"),
    ("class-dependent", "class_dependent"), ("human", None), ("human:a.pt", None),
    ("human:#worse_label", None), ("transition:", "transition:FILE"), ("gaussian", None), (None, None)])
def test_names_that_are_not(name, meant):
    for refuse in (check_noise_name, lambda name: add_noise(name, LABELS, 0.4, 10, 0)):
        with pytest.raises(ValueError, match="noise: got .*, expected one of uniform_including_true, ") as error: refuse(name)
        assert meant is None or str(error.value).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("name, file, bare", [
    ("pair_flip", None, "pair_flip"), ("transition:~/T.npy", ("transition", "HOME/T.npy", ""), "transition:T.npy"),
    ("human:a/b.pt#c", ("human", "a/b.pt", "c"), "human:b.pt#c"),
    ("human:C:\\x\\y#z.npz#c", ("human", "C:\\x\\y#z.npz", "c"), "human:y#z.npz#c")])
def test_a_name_says_its_file(name, file, bare, monkeypatch):
    monkeypatch.setenv("HOME", "HOME")
    check_noise_name(name)  # before any file is there
    assert noise_file(name) == file and bare_noise(name) == bare


@pytest.mark.parametrize("name", list(NOISES))
def test_by_name_is_by_hand(name):
    labels, images = torch.arange(90) % 10, torch.rand(90, 5, generator=torch.Generator().manual_seed(0))
    extra = (images,) if name == "instance_dependent" else ()
    by_hand = NOISES[name](labels, 0.4, 10, 3, *extra)
    by_name = add_noise(name, labels, 0.4, 10, torch.Generator().manual_seed(3), images=images)
    assert torch.equal(by_hand.labels, by_name.labels) and torch.equal(by_hand.touched, by_name.touched)


def test_noise_from_files(tmp_path):
    write(tmp_path/"people.npz", **published())
    matrix = 0.6 * np.eye(10) + 0.4 * np.roll(np.eye(10), 1, axis=1)
    np.save(tmp_path/"T.npy", matrix)
    noisy = {name: partial(add_noise, name, CLEAN, num_classes=10, seed=2, root=tmp_path)
             for name in ("human:people.npz#worse_label", "transition:T.npy")}
    expected = GIVEN, from_transition(CLEAN, matrix, 2).labels
    for (name, noise), labels in zip(noisy.items(), expected):
        assert (noise(eta=1).labels == labels).all() and noise(eta=1.0).touched.all()
        assert (noise(eta=0).labels == CLEAN).all() and not noise(eta=0.0).touched.any()
        with pytest.raises(ValueError, match="eta: got 0.4, expected 1 to take the noise of"): noise(eta=0.4)
        with pytest.raises(ValueError, match="eta: got 2, expected 1 to take the noise of"): noise(eta=2)
        absolute = name.replace(":", f":{tmp_path}/")
        assert (add_noise(absolute, CLEAN, 1, 10, 2).labels == labels).all()
    with pytest.raises(ValueError, match=r"T.npy: got 10 classes, expected 20"):
        noisy["transition:T.npy"](eta=1, num_classes=20)


