"""Records of runs that never were, to see the pages and the audit filled."""
from types import SimpleNamespace

from tce_nb.run.records import make_record, write_record
from tce_nb.run.plan import image_counts
from tce_nb.run.train import Run
from tce_nb.run.config import lr_milestones, learning_rate


def accuracy_of(config):
    "The accuracy a made-up run ends with: tamed losses lose less to noise"
    gain = {"ce": 0.0, "mse": -0.02, "mae": -0.3}.get(config.loss, config.alpha / 20)
    return 0.6 - (0.4 - gain / 2) * config.eta + 0.002 * config.seed


def history_of(config):
    "A curve that rises, jumps at the first drop and sinks a little after it"
    drop, rows = lr_milestones(config)[0], []
    for epoch in range(1, config.epochs + 1):
        share = 0.8 * epoch / drop if epoch < drop else 1 - 0.05 * (epoch - drop) / config.epochs
        accuracy = accuracy_of(config) * share
        rows.append(dict(epoch=epoch, lr=learning_rate(config, epoch), train_loss=1.0, test_accuracy=accuracy, clean_accuracy=accuracy,
                         memorised=0.1, corrected=0.3, seconds=2.0, images_per_second=250.0,
                         **({"val_accuracy": accuracy} if config.hold_out else {})))
    return rows


def make_up(jobs, folder):
    "Write a record for each job of a plan into a folder of results"
    for job in jobs:
        config = job.config
        trained, tested = image_counts(config, "nowhere")
        held = int(trained * config.hold_out if config.hold_out < 1 else config.hold_out)
        classes = 100 if config.dataset == "cifar100" else 10
        task = SimpleNamespace(
            data=SimpleNamespace(num_classes=classes, test_labels=range(tested)), content="made up", fingerprint="made up",
            kept=range(trained - held), held=range(held))
        run = Run(config, history_of(config), config.eta * (1 - 1 / classes), task=task)
        write_record(make_record(run, selected=lr_milestones(config)[0]), folder)
