"""Claims: the rules of a verdict, what a comparison reads, and what made-up and committed runs say of every claim."""
import math
from collections import namedtuple

import pandas as pd
import pytest
from conftest import ROOT

from tce_nb.report.claims import (
    CLAIMS, VERDICTS, Comparison, claims_table, label_of, outcome, read_evidence, result_of, verdict)
from tce_nb.report.results import Gain
from tce_nb.run.config import Config
from tce_nb.run.plan import ETAS, METHODS
from tce_nb.run.records import gather, histories

SUPPORTED, MOSTLY, CONTRADICTED, UNDECIDED = VERDICTS
Cell = namedtuple("Cell", "dataset eta method")
BENCH = {"rows": [dict(name="TCE / CE epoch of the trainer", ratio=1.004, low=1.0, high=1.007, rounds=54)]}


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)  # the paper's numbers are found from here


def world(accuracy, rise=lambda cell: 0, memorised=lambda cell: 0.3, scale="short", seeds=3, cells=None, wobble=0.2):
    "Runs and histories of every cell with these accuracies, rises and shares; a seed adds a little to all of it"
    rows, epochs = [], []
    for cell in cells or [Cell(d, eta, m) for d in ETAS for eta in ETAS[d] for m in METHODS]:
        for seed in range(1, seeds + 1):
            name, more = f"{cell}-{scale}-{seed}", wobble * math.sin(seed * (3 + METHODS.index(cell.method)) + cell.eta)
            value = accuracy(cell) + more
            rows.append(dict(vars(Config()), **cell._asdict()) | dict(
                name=name, scale=scale, version="", hold_out=0.1, seed=seed, diverged=None, tested_on=10_000, epochs=32,
                classes=100 if cell.dataset == "cifar100" else 10, selected=value / 100, last=value / 100))
            curve = [value * min(1, k / 12) * 0.9 for k in range(1, 17)] + [value] * 8 + [value - rise(cell) - more] * 8
            epochs += [dict(name=name, epoch=epoch, lr=0.1 if epoch <= 16 else 0.01, test_accuracy=point / 100,
                            memorised=memorised(cell) + more / 100) for epoch, point in enumerate(curve, 1)]
    return pd.DataFrame(rows), pd.DataFrame(epochs)


def as_claimed(cell):
    "Every tamed loss gains under noise, the more the larger its exponent; MAE guesses; MSE is a little slower than CE"
    if cell.method == "mae": return 1 if cell.dataset == "cifar100" else 10
    alpha = float(cell.method[4:]) if cell.method.startswith("tce") else 0
    return 70 - 30 * cell.eta + (6 * alpha * cell.eta if cell.eta else 0.5)


def verdicts(*args, **kwargs):
    return claims_table(*world(*args, **kwargs), BENCH).ours


# the rules

YES, MAYBE, NO, BUT, ONCE = (True, True), (True, False), (False, True), (False, False), (True, None)


@pytest.mark.parametrize("found, word", [
    ([YES], SUPPORTED), ([YES, MAYBE], SUPPORTED), ([YES, MAYBE, MAYBE], MOSTLY), ([YES, ONCE, ONCE], SUPPORTED),
    ([YES, MAYBE, BUT], MOSTLY), ([YES, YES, YES, NO], MOSTLY), ([YES, YES, BUT, BUT, BUT], UNDECIDED),
    ([YES, MAYBE, NO], UNDECIDED), ([YES, NO], CONTRADICTED), ([NO, BUT, YES], CONTRADICTED),
    ([MAYBE] * 9, UNDECIDED), ([BUT] * 9, UNDECIDED), ([ONCE] * 9, UNDECIDED), ([], UNDECIDED)])
def test_the_rules_of_a_verdict(found, word):
    assert verdict(found) == word and f"**{word}**" in (ROOT/"nbs/paper/verdict.ipynb").read_text()


@pytest.mark.parametrize("low, points, high, as_good", [
    (-1, 0, 1, YES), (-9, 0, 9, MAYBE), (math.nan, 0, math.nan, ONCE), (2.5, 3, 4, NO), (-4, -3, -2.5, NO), (1, 3, 5, BUT), (1, 1.5, 3, MAYBE)])
def test_being_as_good_does_not_reward_wide_intervals(low, points, high, as_good):
    assert outcome(Gain(points, 3, low, high), margin=2) == as_good


def result(frame, history, *comparison):
    return result_of(read_evidence(frame, history), Comparison(*comparison), BENCH)


def test_a_comparison_is_paired_and_has_the_papers_difference():
    found = result(*world(as_claimed), "cifar10", 0.8, "tce:2", "ce")
    assert (found["label"], found["scale"], found["unit"]) == ("CIFAR-10, η = 0.8: TCE α = 2 − CE", "short", "points")
    assert found["ours"].n == 3 and abs(found["ours"].points - 9.6) < 0.5 and abs(found["paper"].points - 9.36) < 1e-9
    assert result(*world(as_claimed), "cifar10", 0.8, "gce", "ce")["ours"] is None


def test_a_comparison_counts_once_at_the_first_scale_that_has_it():
    cells = [Cell("cifar10", 0.4, m) for m in ("ce", "tce:1.5")]
    (a, b), (c, d) = (world(as_claimed, scale=scale, cells=cells) for scale in ("short", "few"))
    old, old_history = world(as_claimed, scale="cpu", cells=[*cells, Cell("cifar10", 0.4, "mse"), Cell("mnist", 0.4, "ce")])
    every, history = pd.concat([a, c, old]), pd.concat([b, d, old_history])
    for frame, loss, quantity, scale in ((every, "tce:1.5", "accuracy", "short"), (every, "tce:1.5", "rise", "few"),  # it takes epochs
                                         (every, "mse", "accuracy", "cpu"), (old, "tce:1.5", "rise", "cpu"), (a, "tce:1.5", "rise", "")):
        assert result(frame, history, "cifar10", 0.4, loss, "ce", quantity)["scale"] == scale
    assert result(every, history, "mnist", 0.4, "ce", 0.0, "drop")["scale"] == "cpu"
    assert all(len({label_of(one) for one in claim.comparisons}) == len(claim.comparisons) for claim in CLAIMS)


def test_a_run_that_never_gets_there_counts_with_all_its_epochs():
    found = result(*world(lambda cell: 80 if cell.method == "ce" else 30), "cifar10", 0.4, "mse", "ce", "epochs")
    assert found["unit"] == "epochs" and 10 < found["ours"].points < 32 and found["paper"].points > 0


def test_a_world_like_the_papers_bears_its_claims_out():
    found = verdicts(as_claimed)
    for name in ("tce-0-5", "tce-1-5", "every-alpha", "best-alpha", "noise-helps", "clean", "mae", "time"):
        assert found[name] in (SUPPORTED, MOSTLY), name


def test_the_opposite_world_contradicts_them():
    found = verdicts(lambda cell: 2 * (70 - 30 * cell.eta) - as_claimed(cell) if cell.method != "mae" else 60)
    for name in ("tce-1-5", "every-alpha", "best-alpha", "mae", "gains-80", "trade-off"):
        assert found[name] == CONTRADICTED, name


def test_one_seed_decides_nothing_but_the_time():
    found = verdicts(as_claimed, seeds=1)
    assert set(found[found != UNDECIDED].index) == {"time"}


def test_memorising_is_read_where_there_are_epochs_for_it():
    cells = [Cell("cifar10", eta, m) for eta in ETAS["cifar10"] for m in METHODS if m != "mae"]
    few = dict(scale="few", cells=cells, rise=lambda cell: 20 * cell.eta * (cell.method == "ce"),
               memorised=lambda cell: 0.5 - 0.1 * METHODS.index(cell.method) * (cell.eta > 0) / 2)
    found = verdicts(as_claimed, **few)
    assert all(found[name] == SUPPORTED for name in ("rise-ce", "rise-noise", "rise-less", "memorised", "memorised-alpha", "drop"))
    (a, b), (c, d) = world(as_claimed, **few), world(as_claimed)  # short runs say nothing about it
    table = claims_table(pd.concat([a, c]), pd.concat([b, d]), BENCH)
    assert table.ours["rise-ce"] == SUPPORTED and {r["scale"] for r in table.comparisons["rise-ce"] if r["ours"]} == {"few"}


def test_the_papers_own_numbers_and_no_runs():
    frame = gather(ROOT/"results")
    table = claims_table(frame[:0], histories(ROOT/"results")[:0], BENCH)
    assert set(table.ours.drop("time")) == {UNDECIDED} and set(table["count"].drop("time")) == {"no runs yet"}
    assert (table.paper == SUPPORTED).sum() >= 8 and table.paper["every-alpha"] == MOSTLY
    assert set(table.paper[["drop", "rise-ce", "memorised", "time"]]) == {UNDECIDED}  # no number is printed


def test_the_committed_records_are_judged_and_shown():
    table = claims_table(gather(ROOT/"results"), histories(ROOT/"results"))
    assert set(table.ours) <= set(VERDICTS) and table.ours["time"] == SUPPORTED
    assert list(table.index) == [claim.name for claim in CLAIMS] and all(table.comparisons.map(len))
