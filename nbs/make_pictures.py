"""Draw the book's pictures of real images: a strip of each data set with noisy labels, and
the labels that a network trained on CIFAR-10 doubts most.

Needs the data sets (`TCE_DATA`). From the project's root: python nbs/make_pictures.py
"""
import json
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from tce_nb import rank_labels
from tce_nb.noise import CIFAR10, CIFAR100, uniform_including_true
from tce_nb.run.config import preset
from tce_nb.run.data import Images, load
from tce_nb.run.train import predict, train

ROOT = Path(__file__).resolve().parents[1]
GREY, WRONG = "#787878", "#d55e00"  # legible on white and on dark pages
NAMES = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def draw(name, images, labels, true_labels, names, columns):
    "Images, each under the label it was given, and its true one if that differs"
    rows = -(-len(images) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5, 1.75 * rows))
    for axes, image, label, true in zip(
            panels.flat, images, labels.tolist(), true_labels.tolist()):
        axes.axis("off")
        axes.imshow(image.permute(1, 2, 0).squeeze(), cmap="gray")
        label, true = (names[i].replace("_", " ") for i in (label, true))
        wrong = label != true
        title = f"{label}\n" + textwrap.fill(f"not {true}", 14) if wrong else label
        axes.set_title(title, size=9, color=WRONG if wrong else GREY)
    figure.tight_layout(pad=0.3, h_pad=0.5)
    file = ROOT/"_static"/f"{name}.png"
    figure.savefig(file, dpi=120, transparent=True, metadata={"Software": None})
    plt.close(figure)
    print(file.name, file.stat().st_size, "bytes")


def draw_strip(dataset):
    "The first training images of a data set with 40% noise"
    data = load(dataset)
    noisy = uniform_including_true(
        data.train_labels[:10], eta=0.4, num_classes=data.num_classes, seed=0)
    draw(f"strip-{dataset}", data.train_images[:10], noisy.labels, noisy.true_labels,
         NAMES.get(dataset, [str(digit) for digit in range(10)]), columns=5)


def draw_suspects():
    "The labels that a short training on noisy CIFAR-10 doubts most, and how many are wrong"
    run = train(preset("short", dataset="cifar10", loss="tce", alpha=1.5, eta=0.4,
                       train_per_class=1000, epochs=12, depth=8, hold_out=0))
    data, noisy = run.task.data, run.task.noisy
    images = Images(data.train_images, run.task.mean, run.task.std)
    suspects = rank_labels(predict(run.net, images), noisy.labels)
    found = dict(
        images=len(noisy.labels), epochs=len(run.history), wrong_rate=noisy.wrong_rate,
        test_accuracy=run.history[-1]["test_accuracy"],
        first_hundred=noisy.wrong[suspects[:100]].sum().item(),
        first_thousand=noisy.wrong[suspects[:1000]].sum().item())
    (ROOT/"results"/"suspects.json").write_text(json.dumps(found, indent=1) + "\n")
    first = suspects[:16]
    draw("suspects", data.train_images[first], noisy.labels[first],
         noisy.true_labels[first], CIFAR10, columns=4)


if __name__ == "__main__":
    matplotlib.use("Agg")
    for dataset in ("cifar10", "cifar100", "svhn", "mnist"): draw_strip(dataset)
    draw_suspects()
