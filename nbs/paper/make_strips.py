"""Draw the pictures of the setup page: ten images of each data set, with noisy labels.

Needs the data sets (`TCE_DATA`). From the project's root: python nbs/paper/make_strips.py
"""
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from tce_nb.noise import uniform_including_true
from tce_nb.run.data import load

FOLDER = Path(__file__).resolve().parents[2]/"_static"
COUNT, COLUMNS = 10, 5
GREY, WRONG = "#787878", "#d55e00"  # legible on white and on dark pages

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
CIFAR100 = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
bowl boy bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee
clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit
raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()
NAMES = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def draw(dataset):
    "The first training images, each under the label that training sees"
    data = load(dataset, download=False)
    names = NAMES.get(dataset, [str(digit) for digit in range(10)])
    assert len(names) == data.num_classes
    noisy = uniform_including_true(
        data.train_labels[:COUNT], eta=0.4, num_classes=data.num_classes, seed=0)
    figure, panels = plt.subplots(COUNT // COLUMNS, COLUMNS, figsize=(5, 3.2))
    for axes, image, label, true in zip(
            panels.flat, data.train_images, noisy.labels.tolist(), noisy.true_labels.tolist()):
        axes.axis("off")
        axes.imshow(image.permute(1, 2, 0).squeeze(), cmap="gray")
        label, true = (names[i].replace("_", " ") for i in (label, true))
        wrong = label != true
        title = f"{label}\n" + textwrap.fill(f"not {true}", 12) if wrong else label
        axes.set_title(title, size=9, color=WRONG if wrong else GREY)
    figure.tight_layout(pad=0.3, h_pad=0.5)
    file = FOLDER/f"strip-{dataset}.png"
    figure.savefig(file, dpi=120, transparent=True, metadata={"Software": None})
    plt.close(figure)
    print(file.name, file.stat().st_size, "bytes")


if __name__ == "__main__":
    matplotlib.use("Agg")
    for dataset in ("cifar10", "cifar100", "svhn", "mnist"): draw(dataset)
