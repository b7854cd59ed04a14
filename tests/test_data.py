"""Data sets from good and bad files, and the augmentation's distribution."""
import concurrent.futures
import importlib
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
    labels = np.arange(1, 21)  # a named set may lack a class
    save(tmp_path/"cifar100.npz", train_labels=labels, test_labels=labels[:10])
    monkeypatch.setattr(data, "import_torchvision", lambda: pytest.fail("torchvision was used"))
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    for loaded in (load("cifar100"), load("cifar100", root=tmp_path)):
        assert loaded.num_classes == 100 and loaded.mirror and loaded.name == "cifar100"


@pytest.mark.parametrize("changes, message", [
    (dict(train_images=None), "got no train_images, expected the arrays train_images, train_labels"),
    (dict(train_images=np.zeros((20, 3, 32, 32))), "train_images: got float64 of shape (20, 3, 32, 32), expected uint8"),
    (dict(test_images=np.zeros((10, 32, 32, 3), np.uint8)), "test_images: got uint8 of shape (10, 32, 32, 3)"),
    (dict(train_images=np.zeros((20, 1, 32, 32), np.uint8)), "with the same C in both parts"),
    (dict(train_labels=np.arange(19)), "train_labels: got int64 of shape (19,), expected 20 integers"),
    (dict(train_labels=np.arange(20) / 2), "train_labels: got float64"),
    (dict(test_labels=np.arange(10) - 1), "test_labels: got int64 of shape (10,), expected 10 integers from 0"),
    (dict(train_labels=np.array([{}] * 20)), "no readable .npz file"),
    (dict(test_labels=np.arange(0)), "test_labels: got int64 of shape (0,), expected 10 integers"),
])
def test_bad_npz_is_named(tmp_path, changes, message):
    path = save(tmp_path/"bad.npz", **changes)
    with pytest.raises(DataError) as error: load_npz(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


@pytest.mark.parametrize("damage", ["empty", "cut", "flip"])
def test_a_damaged_npz_is_named(tmp_path, damage):
    path = save(tmp_path/"bad.npz")
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes({"empty": b"", "cut": whole[:half], "flip": whole[:half] + b"flip" + whole[half + 4:]}[damage])
    with pytest.raises(DataError, match="bad.npz: no readable .npz file"): load_npz(path)
    path.unlink()
    with pytest.raises(DataError, match="bad.npz: no readable .npz file .*No such file"): load_npz(path)


def test_mnist_is_padded(tmp_path):
    raw = tmp_path/"MNIST"/"raw"
    raw.mkdir(parents=True)
    for part, size in (("train", 30), ("t10k", 15)):
        images = struct.pack(">IIII", 2051, size, 28, 28) + bytes(i % 256 for i in range(size * 784))
        (raw/f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw/f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, size) + bytes(i % 10 for i in range(size)))
    loaded = load("mnist", root=tmp_path)
    assert loaded.train_images.shape == (30, 1, 32, 32) and len(loaded.test_labels) == 15
    assert (loaded.train_images[:, :, :2] == 0).all() and (loaded.train_images[..., -2:] == 0).all()
    assert loaded.train_images[0, 0, 2, 2:6].tolist() == [0, 1, 2, 3] and not loaded.mirror
    assert loaded.train_labels.tolist() == [*range(10)] * 3


@pytest.mark.parametrize("dataset, files", [
    ("cifar10", [*(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)), "cifar-10-batches-py/test_batch"]),
    ("svhn", ["train_32x32.mat", "test_32x32.mat"])])
def test_files_with_another_checksum_are_never_opened(tmp_path, monkeypatch, dataset, files):
    def no_network(*_): raise DataError("no network")
    monkeypatch.setattr(data, "_download", no_network)
    owned = tmp_path/"owned"
    for name in files:
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_bytes(f"cos\nsystem\n(S'touch {owned}'\ntR.".encode())
    with pytest.raises(DataError, match="no network"):
        load(dataset, root=tmp_path)
    assert not owned.exists()


def test_one_process_downloads_and_the_others_wait(tmp_path, monkeypatch):
    busy = []
    def open_slowly(dataset, root, download=False):
        if not download: raise RuntimeError("not found")
        busy.append(root)
        assert len(busy) == 1
        time.sleep(0.05)
        busy.clear()
        return [(np.zeros((2, 32, 32, 3), np.uint8), [0, 1])] * 2
    monkeypatch.setattr(data, "_open", open_slowly)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load("cifar10", root=tmp_path/"new"), range(4)))
    assert all(len(each.train_labels) == 2 and each.mirror for each in loaded)


def test_the_roots_order(monkeypatch):
    monkeypatch.setenv("TCE_DATA", "/from/environment")
    assert data_root() == Path("/from/environment") and data_root("here") == Path("here")
    monkeypatch.delenv("TCE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_root() == Path("/cache/tce_nb")


def test_torchvision_works_beside_this_pytorch_and_is_repaired_only_when_it_fails(monkeypatch):
    vision = import_torchvision()
    assert vision is import_torchvision() is sys.modules["torchvision"] and hasattr(vision.datasets, "CIFAR100")
    monkeypatch.setattr(torch.library, "Library", lambda *_: pytest.fail("nothing to repair"))
    assert import_torchvision() is vision
    def fail(name): raise RuntimeError("another reason")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="another reason"): import_torchvision()


def test_subset_keeps_the_original_order():
    labels = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0))
    expected = sorted(i for c in range(4) for i in (labels == c).nonzero()[:7, 0].tolist())
    assert first_per_class(labels, 7).tolist() == expected
    digits = load("digits")
    assert subset(digits) is digits
    with pytest.raises(ValueError, match="test_per_class: got 99 per class, but class 0 has"): subset(digits, 9, 99)


@pytest.mark.parametrize("size, count", [(0, 0), (0.1, 100), (5, 5), (999, 999)])
def test_hold_out_sizes(size, count):
    kept, held = hold_out(1000, size, torch.Generator().manual_seed(0))
    assert len(held) == count and sorted(kept.tolist() + held.tolist()) == list(range(1000))


@pytest.mark.parametrize("size", [-1, 1000, 5000, 0.0001])
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
