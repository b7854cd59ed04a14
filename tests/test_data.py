"""Data sets from good and bad files, and the augmentation's distribution."""
import concurrent.futures
import gzip
import hashlib
import importlib
import math
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tce_nb.run import data
from tce_nb.run.data import (
    DataError, Images, channel_stats, data_root, epoch_batches,
    first_per_class, hold_out, import_torchvision, load, load_npz, subset)


def arrays(n=20, channels=3, **changes):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(n, channels, 32, 32), dtype=np.uint8)
    labels = np.arange(n) % 5
    return {"train_images": images, "train_labels": labels, "test_images": images[:10],
            "test_labels": labels[:10], **changes}


def save(path, **changes):
    content = {k: v for k, v in arrays(**changes).items() if v is not None}
    np.savez(path, **content)
    return path


def test_npz_round_trip(tmp_path):
    loaded = load(str(save(tmp_path/"mine.npz", mirror=np.array(True))))
    assert loaded.name == "mine" and loaded.num_classes == 5 and loaded.mirror
    for name, value in arrays().items():
        assert (getattr(loaded, name).numpy() == value).all()
    assert loaded.train_labels.dtype == torch.int64


def test_a_root_with_an_npz_needs_no_torchvision(tmp_path, monkeypatch):
    save(tmp_path/"cifar100.npz")
    monkeypatch.setattr(data, "import_torchvision", lambda: pytest.fail("torchvision was used"))
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    for loaded in (load("cifar100"), load("cifar100", root=tmp_path)):
        assert loaded.num_classes == 100 and loaded.mirror and loaded.name == "cifar100"


@pytest.mark.parametrize("changes, message", [
    (dict(train_images=None), "has no train_images"),
    (dict(train_images=np.zeros((20, 3, 32, 32))), "train_images is float64 of shape (20, 3, 32, 32), expected uint8"),
    (dict(test_images=np.zeros((10, 32, 32, 3), np.uint8)), "test_images is uint8 of shape (10, 32, 32, 3)"),
    (dict(train_images=np.zeros((20, 1, 32, 32), np.uint8)), "1 channels in training and 3 in test"),
    (dict(train_labels=np.arange(19)), "labels of train_images are int64 of shape (19,), expected 20"),
    (dict(train_labels=np.arange(20) / 2), "labels of train_images are float64"),
    (dict(test_labels=np.arange(10) - 1), "the labels of test_images hold -1, expected 0 to 65535"),
    (dict(train_labels=np.array([{}] * 20)), "not a readable .npz file"),
    (dict(mirror=np.array("false")), "mirror is <U5 of shape (), expected one True or False"),
])
def test_bad_npz_is_named(tmp_path, changes, message):
    path = save(tmp_path/"bad.npz", **changes)
    with pytest.raises(DataError) as error: load_npz(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


@pytest.mark.parametrize("keep", [0, 30_000])
def test_a_cut_npz_is_named(tmp_path, keep):
    path = save(tmp_path/"cut.npz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="cut.npz: not a readable .npz file, or cut short"):
        load_npz(path)


def test_one_flipped_byte_is_noticed(tmp_path):
    path = save(tmp_path/"flipped.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="flipped.npz: not a readable"): load_npz(path)


def test_labels_beyond_the_class_count(tmp_path):
    save(tmp_path/"mnist.npz", channels=1, train_labels=np.arange(20))
    with pytest.raises(DataError, match="holds the label 19, expected 0 to 9"):
        load("mnist", root=tmp_path)


def write_mnist(root, monkeypatch, n=30):
    "A tiny MNIST in the original format, with checksums to match"
    raw = root/"MNIST"/"raw"
    raw.mkdir(parents=True)
    sums = []
    for name in data._MNIST:
        size = n if name.startswith("train") else n // 2
        body = (struct.pack(">IIII", 2051, size, 28, 28) + bytes(range(256)) * (size * 784 // 256 + 1)
                if "images" in name else struct.pack(">II", 2049, size) + bytes(i % 10 for i in range(size)))
        length = 16 + size * 784 if "images" in name else 8 + size
        with gzip.GzipFile(raw/name, "wb", mtime=0) as file: file.write(body[:length])
        sums.append((name, hashlib.md5((raw/name).read_bytes()).hexdigest()))
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "resources", sums)
    return raw


def test_mnist_is_padded_and_its_folder_left_alone(tmp_path, monkeypatch):
    raw = write_mnist(tmp_path, monkeypatch)
    before = {p.name: p.read_bytes() for p in raw.iterdir()}
    loaded = load("mnist", root=tmp_path)
    assert loaded.train_images.shape == (30, 1, 32, 32) and len(loaded.test_labels) == 15
    assert (loaded.train_images[:, :, :2] == 0).all() and (loaded.train_images[..., -2:] == 0).all()
    assert loaded.train_images[0, 0, 2, 2:6].tolist() == [0, 1, 2, 3] and not loaded.mirror
    assert {p.name: p.read_bytes() for p in raw.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_mnist_archive_is_named(tmp_path, monkeypatch, damage):
    archive = write_mnist(tmp_path, monkeypatch)/data._MNIST[1]
    content = bytearray(archive.read_bytes())
    if damage == "cut": content = content[:len(content) // 2]
    else: content[-1] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match="train-labels-idx1-ubyte.gz: cut short or damaged"):
        load("mnist", root=tmp_path)


def test_damaged_cifar_files_are_never_unpickled(tmp_path):
    folder = tmp_path/"cifar-10-batches-py"
    folder.mkdir()
    owned = tmp_path/"owned"
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]:
        (folder/name).write_bytes(f"cos\nsystem\n(S'touch {owned}'\ntR.".encode())
    with pytest.raises(DataError, match="cifar-10-batches-py: incomplete or damaged"):
        load("cifar10", root=tmp_path)
    assert not owned.exists()


def test_a_download_is_moved_into_place_whole(tmp_path, monkeypatch):
    folder = "cifar-10-batches-py"
    def download(dataset, root, download):
        (root/folder).mkdir()
        (root/folder/"file").write_text("whole")
        (root/"archive.tar.gz").write_text("not needed any more")
    monkeypatch.setattr(data, "_open", download)
    data._download("cifar10", tmp_path)
    data._download("cifar10", tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {".cifar10.lock"} == {folder}
    assert (tmp_path/folder/"file").read_text() == "whole"


def test_one_process_fetches_and_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    begun = []
    def slow_download(dataset, root, download):
        begun.append(root)
        time.sleep(0.3)
        (root/"cifar-10-batches-py").mkdir()
    monkeypatch.setattr(data, "_open", slow_download)
    (tmp_path/".part-cifar10-old").mkdir()
    (tmp_path/".part-svhn-other").mkdir()  # perhaps somebody's at this moment
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: data._download("cifar10", tmp_path), range(4)))
    assert len(begun) == 1
    assert {p.name for p in tmp_path.iterdir()} - {".cifar10.lock"} == {"cifar-10-batches-py", ".part-svhn-other"}


@pytest.mark.parametrize("damaged", ["train_32x32.mat", "test_32x32.mat"])
def test_damaged_files_of_svhn_are_named(tmp_path, monkeypatch, damaged):
    kinds = import_torchvision().datasets.SVHN.split_list
    sums = {}
    for split, name in (("train", "train_32x32.mat"), ("test", "test_32x32.mat")):
        (tmp_path/name).write_bytes(name.encode())
        sums[split] = ["", name, "0" * 32 if name == damaged else hashlib.md5(name.encode()).hexdigest()]
    monkeypatch.setattr(import_torchvision().datasets.SVHN, "split_list", {**kinds, **sums})
    with pytest.raises(DataError, match=f"{damaged}.*: incomplete or damaged"): load("svhn", root=tmp_path)


def test_the_roots_order(monkeypatch):
    monkeypatch.setenv("TCE_DATA", "/from/environment")
    assert data_root() == Path("/from/environment") and data_root("here") == Path("here")
    monkeypatch.delenv("TCE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_root() == Path("/cache/tce_nb")


def test_torchvision_works_beside_this_pytorch():
    vision = import_torchvision()
    assert vision is import_torchvision() is sys.modules["torchvision"]
    assert hasattr(vision.datasets, "CIFAR100")


def test_torchvision_is_repaired_only_when_it_fails(monkeypatch):
    def no_repair(*_): raise AssertionError("nothing to repair")
    monkeypatch.setattr(torch.library, "Library", no_repair)
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    assert import_torchvision() == "torchvision"
    def fail(name): raise RuntimeError("another reason")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="another reason"): import_torchvision()


def test_subset_keeps_the_original_order():
    labels = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0))
    expected = sorted(i for c in range(4) for i in (labels == c).nonzero()[:7, 0].tolist())
    assert first_per_class(labels, 7).tolist() == expected
    digits = load("digits")
    assert subset(digits) is digits


@pytest.mark.parametrize("size, count", [(0, 0), (0.1, 100), (5, 5), (999, 999)])
def test_hold_out_sizes(size, count):
    kept, held = hold_out(1000, size, torch.Generator().manual_seed(0))
    assert len(held) == count and sorted(kept.tolist() + held.tolist()) == list(range(1000))


@pytest.mark.parametrize("size", [-1, 1000, 5000, 0.0001, 1.5, 999.9, math.nan, math.inf])
def test_an_impossible_hold_out_is_refused(size):
    with pytest.raises(ValueError, match=f"hold_out: got {size}"):
        hold_out(1000, size, torch.Generator())


def test_every_offset_and_flip_equals_torchvision():
    functional = import_torchvision().transforms.functional
    raw = torch.from_numpy(arrays(n=4)["train_images"])
    mean, std = channel_stats(raw)
    images = Images(raw, mean, std, mirror=True)
    for flip in (False, True):
        for y in range(9):
            for x in range(9):
                index = torch.arange(4)
                cut = images.cut(index, torch.full((4,), y), torch.full((4,), x), torch.full((4,), flip))
                whole = functional.normalize(raw.float(), mean.tolist(), std.tolist())
                if flip: whole = functional.hflip(whole)
                assert torch.allclose(cut, functional.crop(functional.pad(whole, 4), y, x, 32, 32), atol=1e-6)


@pytest.mark.parametrize("mirror", [False, True])
def test_augmentation_has_torchvisions_distribution(mirror):
    "Offsets are uniform over 9 x 9 and independent of a fair coin"
    marker = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    marker[0, 0, 16, 10] = 255
    images = Images(marker.expand(20_000, 1, 32, 32), torch.zeros(1), torch.ones(1), mirror=mirror)
    counts = torch.zeros(2, 9, 9)
    for batch, _ in epoch_batches(images, 1000, torch.Generator().manual_seed(0)):
        place = batch.flatten(1).argmax(1)
        y, x = 16 + 4 - place // 32, place % 32
        flipped = x > 15  # the marker sits at 10, its mirror image at 21
        x = torch.where(flipped, 21, 10) + 4 - x
        counts.index_put_((flipped.long(), y, x), torch.tensor(1.0), accumulate=True)
    if not mirror: counts = counts[:1]
    assert stats.chisquare(counts.flatten()).pvalue > 1e-4


def test_the_border_is_the_mean_colour():
    images = Images(torch.full((1, 3, 32, 32), 200, dtype=torch.uint8),
                    torch.tensor([100.0, 110.0, 120.0]), torch.ones(3))
    zero, no = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    corner = images.cut(zero, zero, zero, no)
    assert (corner[:, :, :4] == 0).all() and (corner[:, 0, 4:, 4:] == 100).all()


@pytest.mark.parametrize("train, test, message", [
    ([1, 2, 1, 2], [1, 2], "its labels count from 1, expected from 0"),
    ([0, 1, 0, 1], [0, 2], "no training image has the class 2 of a test image")])
def test_labels_that_cannot_be_meant_are_refused(tmp_path, train, test, message):
    images = [np.zeros((len(part), 1, 32, 32), np.uint8) for part in (train, test)]
    np.savez(tmp_path/"mine.npz", train_images=images[0], train_labels=train, test_images=images[1], test_labels=test)
    with pytest.raises(DataError, match=message): load(str(tmp_path/"mine.npz"))


def test_a_named_set_may_lack_a_class(tmp_path):
    images, labels = np.zeros((8, 3, 32, 32), np.uint8), np.arange(1, 9)
    np.savez(tmp_path/"cifar10.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    assert load("cifar10", root=tmp_path).num_classes == 10
