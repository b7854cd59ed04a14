"""Fine-tune a pretrained network on noisy labels for five epochs, with three losses at four rates.

Needs CIFAR-10 and CIFAR-100 (`TCE_DATA`). From the project's root: python nbs/make_fine_tuning.py
Stop it any time: the same command resumes it. Several may run side by side.
"""
import json
import sys
from pathlib import Path

import torch
from filelock import FileLock

from tce_nb.run.checkpoint import atomic_write, environment
from tce_nb.run.config import preset
from tce_nb.run.plan import parse_method
from tce_nb.run.train import evaluate, prepare, train, train_epoch

ROOT = Path(__file__).resolve().parents[1]
RESULTS, BODY = ROOT/"results"/"fine_tuning.json", ROOT/"results"/"work"/"body.pt"
LOSSES, RATES, SEEDS = ("ce", "tce:1.5", "ntce:1.5"), (0.01, 0.03, 0.1, 0.3), (1, 2, 3)


def pretrained():
    "The weights of a ResNet-20 trained on clean CIFAR-10, without its last layer"
    if not BODY.exists():
        run = train(preset("short", dataset="cifar10", loss="ce", epochs=8, hold_out=0),
                    BODY.with_suffix(".checkpoint"), progress=True)
        body = {name: weight for name, weight in run.net.state_dict().items()
                if not name.startswith("linear.")}
        torch.save(dict(body=body, accuracy=run.history[-1]["test_accuracy"]), BODY)
    return torch.load(BODY, weights_only=True)


def setting(word, lr, seed):
    "Five epochs on 100 images of each class of CIFAR-100, 40% noise, a tenth held out"
    return preset("short", dataset="cifar100", train_per_class=100, eta=0.4, epochs=5,
                  milestones=(4, 5), lr=lr, seed=seed, **parse_method(word))


def fine_tune(config, body):
    "Train all layers from the pretrained ones, and measure the last epoch"
    state = prepare(config)
    state.net.load_state_dict(body, strict=False)
    losses = [train_epoch(state, config, epoch)["train_loss"]
              for epoch in range(1, config.epochs + 1)]
    accuracies = {f"{part}_accuracy": evaluate(state.model, *images)["accuracy"]
                  for part, images in state.evaluated.items()}
    return dict(train_loss=losses, **accuracies)


def record(row, accuracy):
    "Add a row to the results"
    with FileLock(f"{BODY}.lock"):
        old = json.loads(RESULTS.read_text()) if RESULTS.exists() else dict(rows=[])
        rows = [json.dumps(each) for each in (*old["rows"], row)]
        about = json.dumps(dict(body_accuracy=accuracy, **environment(torch.device("cpu"))))
        text = '{"about": ' + about + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]}\n"
        atomic_write(RESULTS, text.encode())


def done():
    "What has been run"
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {(row["loss"], row["lr"], row["seed"]) for row in rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    BODY.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{BODY}.making"): start = pretrained()
    for seed in map(int, sys.argv[1:] or SEEDS):
        for lr in RATES:
            for word in LOSSES:
                if (word, lr, seed) in done(): continue
                measured = fine_tune(setting(word, lr, seed), start["body"])
                record(dict(loss=word, lr=lr, seed=seed, **measured), start["accuracy"])
                print(word, lr, seed, measured, flush=True)
