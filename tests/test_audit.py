"""The audit: each verdict can be reached, from any number of records, and from the paper's own tables."""
import json
import math
import re

import pandas as pd
from scipy import stats
import pytest
from conftest import ROOT
from made_up import accuracy_of, make_up as made_up_records

from tce_nb.audit import (
    CLAIMS, CONTRADICTED, IN_PART, MISSING, NO, OPEN, SCENARIOS, SUPPORTED, TAMED, UNDECIDED, VERDICTS, YES, Cell, Claim,
    Estimate, Evidence, Printed, Recorded, above, against, alike, at_full_scale, audit, below, best_alpha, cells_of, common_spread,
    effect, equals, every,
    gains, guessing, judge, larger, levels, positive, provenance, runs_behind,
    section, some, spread, summary, together, undominated, variation, verdict, within)
from tce_nb.data import CLASSES
from tce_nb.figures import evidence, evidence_scale
from tce_nb.records import COLUMNS, gather, histories, paper_numbers
from tce_nb.sweep import METHODS, plan

ALL = cells_of(*METHODS)
BY_NAME = {claim.name: claim for claim in CLAIMS}
RATES = [0.1] * 8 + [0.01] * 8 + [0.001] * 4
RISING = [k / 8 for k in range(1, 9)]  # the shares of the final accuracy that the first stage reaches


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)  # the paper's numbers are found from here


def make_up(accuracy, cells=ALL, seeds=5, spread=0.01, scale="cpu", slide=lambda cell: 0.0, delay=lambda cell: 1.0):
    """Runs and epochs with these accuracies in percent, slides in points, and epochs stretched by a factor."""
    rows, epochs = [], []
    for number, cell in enumerate(cells):
        for seed in range(seeds):
            name, wobble = f"{number}-{seed}", spread * math.sin(7 * number + seed)
            value, lost = accuracy(cell) + wobble, slide(cell) + wobble
            rows.append(dict(cell._asdict(), name=name, seed=seed, scale=scale, hold_out=0, hold_out_noisy=True, epochs=20,
                             noise="uniform_including_true", version="", classes=CLASSES[cell.dataset], diverged=None,
                             selected=value / 100, trained_on=10_000, tested_on=5_000, made_on="cpu"))
            curve = [value * min(1, share / delay(cell)) * 0.95 for share in RISING]
            curve += [value + 1 - lost * k / 6 for k in range(8)] + [value] * 4
            epochs += [dict(name=name, epoch=epoch, lr=lr, test_accuracy=point / 100)
                       for epoch, (lr, point) in enumerate(zip(RATES, curve), 1)]
    return pd.DataFrame(rows), pd.DataFrame(epochs)


def made_up(*args, **kwargs):
    return Recorded(*make_up(*args, **kwargs))


def fair(cell):
    "An accuracy that falls with the noise and is the same for all losses"
    return 60 - 30 * cell.eta


def judged(checks, evidence, **rule):
    return judge(Claim("name", "title", "text", "where", "how", checks, **rule), evidence).verdict


def outcomes(checks, evidence, general=False):
    return [check.outcome for check in checks(evidence, general)]


# outcomes and verdicts

@pytest.mark.parametrize("estimate, outcome", [
    (Estimate(2, 1, 3, 3, 2), YES), (Estimate(-2, -3, -1, 3, 2), NO), (Estimate(2, -1, 5, 3, 2), OPEN),
    (Estimate(2, math.nan, math.nan, 1, 0), OPEN), (Estimate(0.03, 0.03, 0.03), YES),
    (Estimate(0, 0, 0), OPEN), (None, MISSING)])
def test_above(estimate, outcome):
    assert above(estimate) == outcome


def test_one_stray_among_many_does_not_refute():
    stray = Estimate(-2, -3, -1, 3, 2)
    assert above(stray, family=1) == NO and above(stray, family=14) == OPEN
    assert above(Estimate(2, 1, 3, 3, 2), choices=4) == OPEN
    assert above(Estimate(2, 1, 3, 100, 99), choices=4) == YES


class Same(Evidence):
    """Evidence that has the same number for everything."""
    def __init__(self, estimate):
        self.estimate = estimate

    def level(self, quantity, cell):
        return self.estimate

    def compare(self, quantity, first, second):
        return self.estimate


HIGH, LOW = Estimate(1000, 340, 1660, 11, 10), Estimate(-1000, -1660, -340, 11, 10)  # clear, unless widened for many


def test_an_interval_is_widened_for_the_number_of_comparisons():
    assert above(LOW, family=6) == NO and above(LOW, family=14) == OPEN


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.general], ids=lambda claim: claim.name)
def test_a_tendency_is_not_widened(claim):
    found = [outcome for number in (HIGH, LOW) for outcome in outcomes(claim.checks, Same(number), general=True)]
    assert NO in found and OPEN not in found


@pytest.mark.parametrize("name", ["every-alpha", "best-loss"])
def test_what_one_comparison_can_refute_is_widened(name):
    claim, = (claim for claim in CLAIMS if claim.name == name)
    assert OPEN in outcomes(claim.checks, Same(LOW), claim.general) + outcomes(claim.checks, Same(HIGH), claim.general)


@pytest.mark.parametrize("interval, outcome", [
    ((-1, 0, 1), YES), ((3, 2.5, 4), NO), ((-3, -4, -2.5), NO), ((2, 1, 3), OPEN), ((0, -3, 3), OPEN)])
def test_within(interval, outcome):
    assert within(Estimate(*interval, 5, 4), 2) == outcome


@pytest.mark.parametrize("interval, outcome", [
    ((9, 8, 10), YES), ((5, 4, 6), NO), ((12, 11, 13), NO), ((9, -1, 19), OPEN)])
def test_equals(interval, outcome):
    assert equals(Estimate(*interval, 5, 4), 9.36) == outcome


def test_equals_takes_printed_numbers_to_their_second_decimal():
    assert equals(Estimate(*[30.10 - 20.30] * 3), 9.80) == YES
    assert equals(Estimate(*[9.79] * 3), 9.80) == NO


def test_all_or_one():
    assert [every(o) for o in ([YES], [YES, OPEN], [OPEN, MISSING], [MISSING, NO], [])] == [YES, OPEN, MISSING, NO, YES]
    assert [some(o) for o in ([NO], [NO, OPEN], [OPEN, MISSING], [MISSING, YES])] == [NO, OPEN, MISSING, YES]


@pytest.mark.parametrize("found, rule, expected", [
    ([YES] * 14, {}, SUPPORTED),
    ([YES] * 13 + [OPEN], {}, IN_PART),
    ([YES] * 13 + [NO], {}, CONTRADICTED),
    ([NO] + [MISSING] * 13, {}, CONTRADICTED),
    ([YES] * 13 + [MISSING], {}, UNDECIDED),
    ([OPEN] * 14, {}, UNDECIDED),
    ([], {}, UNDECIDED),
    ([YES] * 13 + [NO], dict(allowed=1), SUPPORTED),
    ([YES] * 12 + [NO] * 2, dict(allowed=1), CONTRADICTED),
    ([YES] * 13 + [NO], dict(general=True), IN_PART),
    ([YES] * 7 + [NO] * 7, dict(general=True), CONTRADICTED),
    ([YES] * 8 + [NO] * 6, dict(general=True), IN_PART),
    ([YES] * 2 + [OPEN] * 12 + [NO] * 13, dict(general=True), UNDECIDED),
    ([YES] * 4 + [NO] * 10, dict(general=True), CONTRADICTED),
    ([NO] * 5 + [OPEN] * 9, dict(general=True), UNDECIDED),
    ([NO] * 8 + [OPEN] * 6, dict(general=True), CONTRADICTED),
    ([YES] * 14, dict(enough=False), IN_PART),
    ([YES] + [OPEN] * 13, {}, UNDECIDED),  # one of fourteen comes by chance in three of ten times
    ([YES] * 2 + [OPEN] * 12, {}, IN_PART),
    ([NO] * 5 + [MISSING] * 9, dict(general=True), UNDECIDED)])
def test_verdict(found, rule, expected):
    assert verdict(found, **rule) == expected


# the makers of checks, on made-up records

BETTER = {"ce": 0, "mse": 0, "mae": 0, **{method: 3 for method in TAMED}}
PAIRS = against(cells_of(*TAMED), "ce")


@pytest.mark.parametrize("gain, spread, seeds, expected", [
    (3, 0.01, 5, SUPPORTED), (-3, 0.01, 5, CONTRADICTED), (3, 0.01, 1, UNDECIDED), (0.5, 1, 3, IN_PART)])
def test_larger(gain, spread, seeds, expected):
    ours = made_up(lambda c: fair(c) + gain * (c.method in TAMED), spread=spread, seeds=seeds)
    assert judged(larger("accuracy", PAIRS), ours) == expected


def test_one_cell_refutes_a_claim_about_all_and_a_missing_one_leaves_it_open():
    def but_one(cell): return fair(cell) + (-3 if cell == Cell("svhn", 0.8, "tce:2") else BETTER[cell.method])
    assert judged(larger("accuracy", PAIRS), made_up(but_one)) == CONTRADICTED
    rest = [cell for cell in ALL if cell != Cell("svhn", 0.8, "tce:2")]
    assert judged(larger("accuracy", PAIRS), made_up(but_one, rest)) == UNDECIDED


def test_seeds_are_paired():
    "A large spread that both losses share does not hide a small gain"
    frame, epochs = make_up(lambda c: fair(c) + 0.5 * (c.method in TAMED))
    frame["selected"] += frame.seed / 10
    assert judged(larger("accuracy", PAIRS), Recorded(frame, epochs)) == SUPPORTED
    other = frame.seed.where(frame.method == "ce", frame.seed + 10)  # no common seeds
    assert judged(larger("accuracy", PAIRS), Recorded(frame.assign(seed=other), epochs)) == UNDECIDED


@pytest.mark.parametrize("difference, expected", [(0.5, SUPPORTED), (5, CONTRADICTED)])
def test_alike(difference, expected):
    ours = made_up(lambda c: fair(c) + difference * (c.method == "mse"))
    assert judged(alike("accuracy", against(cells_of("mse"), "ce"), 2), ours) == expected


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("learns", [True, False])
def test_guessing_can_be_refuted_at_any_scale_and_shown_only_at_the_papers(scale, learns):
    cells = cells_of("mae")
    ours = made_up(lambda c: fair(c) if learns or c.method != "mae" else 100 / CLASSES[c.dataset], scale=scale)
    expected = CONTRADICTED if learns else SUPPORTED if scale == "paper" else UNDECIDED
    assert judged(at_full_scale(guessing(cells), YES), ours) == expected
    assert judged(guessing(cells), ours) == (CONTRADICTED if learns else SUPPORTED)


@pytest.mark.parametrize("gain, scale, expected", [
    (9.36, "paper", SUPPORTED), (5, "paper", CONTRADICTED), (9.36, "cpu", UNDECIDED), (5, "cpu", UNDECIDED)])
def test_gains(gain, scale, expected):
    stated = {Cell("cifar10", 0.8, "tce:2"): 9.36}
    ours = made_up(lambda c: fair(c) + gain * (c.method == "tce:2"), scale=scale)
    assert judged(at_full_scale(gains(stated), YES, NO), ours) == expected


def test_best_alpha_needs_one_that_wins():
    checks = best_alpha("ce", "mse")
    assert judged(checks, made_up(lambda c: fair(c) + 3 * (c.method == "tce:1"))) == SUPPORTED
    assert judged(checks, made_up(lambda c: fair(c) - BETTER[c.method])) == CONTRADICTED
    with_noise = made_up(lambda c: fair(c) + 9 * (c.method == "tce:1" and c.eta > 0), spread=0.5)
    assert judged(checks, with_noise) == IN_PART
    one = made_up(lambda c: fair(c) + (3 if c.method == "mse" and (c.dataset, c.eta) == ("cifar10", 0.0)
                                       else BETTER[c.method] / 2))
    assert judged(checks, one) == CONTRADICTED and judged(checks, one, allowed=1) == SUPPORTED
    assert judged(checks, made_up(fair, cells_of("ce", "tce:1"))) == UNDECIDED


def test_spread_is_that_of_the_extreme_exponents():
    small = made_up(lambda c: fair(c) + float(c.method[4:] or 0) / 2 if c.method in TAMED else fair(c))
    large = made_up(lambda c: fair(c) + 4 * float(c.method[4:] or 0) if c.method in TAMED else fair(c))
    assert judged(spread(2, SCENARIOS), small) == SUPPORTED and judged(spread(2, SCENARIOS), large) == CONTRADICTED
    assert spread(2, SCENARIOS)(large)[0].estimate.mean == pytest.approx(6, abs=0.1)


def test_undominated_is_more_accurate_or_faster():
    cell = Cell("cifar100", 0.4, "tce:1.5")
    slow = made_up(lambda c: fair(c) + (c.method == "tce:2"), delay=lambda c: 2.0 if c.method == "tce:2" else 1.0)
    assert outcomes(undominated(cell), slow)[-1] == YES  # faster than alpha = 2
    worst = made_up(lambda c: fair(c) - 5 * (c == cell), delay=lambda c: 2.0 if c == cell else 1.0)
    assert judged(undominated(cell), worst) == CONTRADICTED


def test_speed_and_runs_that_never_arrive():
    mse, ce = (Cell("cifar100", 0.4, method) for method in ("mse", "ce"))
    slow = made_up(fair, delay=lambda c: 1.25 if c.method == "mse" else 1.0)
    assert outcomes(larger("speed", [(mse, ce)]), slow) == [YES]
    assert outcomes(alike("speed", [(mse, ce)], 0.2, True), slow) == [NO]
    never = made_up(lambda c: fair(c) * (0.1 if c.method == "mse" else 1))
    assert never.level("speed", mse).mean == 8  # the last epoch before the drop
    assert never.compare("speed", mse, ce).high == math.inf == -never.compare("speed", ce, mse).low
    assert "(at least +" in effect(larger("speed", [(mse, ce)])(never))
    assert outcomes(larger("speed", [(mse, ce)]), never) == [YES]
    assert outcomes(larger("speed", [(mse, mse)]), never) == [OPEN]  # neither gets there
    assert "neither gets there" in effect(larger("speed", [(mse, mse)])(never))
    assert made_up(fair, [mse]).level("speed", mse) is None  # no cross entropy to set the bar


def test_a_bar_that_is_crossed_after_the_drop_says_nothing_of_speed():
    mse, ce = (Cell("cifar100", 0.4, method) for method in ("mse", "ce"))
    late = made_up(fair, delay=lambda c: 4.0 if c.method == "mse" else 3.9)
    assert late.level("accuracy", mse).mean == pytest.approx(48, abs=0.1)  # both get there in the end
    assert outcomes(larger("speed", [(mse, ce)]), late) == [OPEN]


def test_a_tie_without_a_common_spread_decides_nothing():
    frame, epochs = make_up(lambda c: 50 - 2 * (c.method == "mse"), seeds=2, spread=0)
    pair = [(Cell("svhn", 0.0, "ce"), Cell("svhn", 0.0, "mse"))]
    for pooled in (True, False):
        assert outcomes(larger("accuracy", pair), Recorded(frame, epochs, pooled=pooled)) == [OPEN]


def test_few_seeds_can_contradict_a_claim_about_many_cells():
    "One of 56 comparisons that clearly loses, with three seeds, is enough"
    cells = cells_of(*TAMED)
    worse = Cell("cifar100", 0.4, "tce:2")
    ours = made_up(lambda c: fair(c) + (c.method in TAMED) - 6 * (c == worse), seeds=3, spread=0.5)
    found = dict(zip(cells, outcomes(larger("accuracy", against(cells, "ce")), ours)))
    assert found[worse] == NO and list(found.values()).count(NO) == 1
    std, df = common_spread(ours, "cifar100", 0.4)
    assert 0.2 < std < 2 and df == 2 * 5  # seeds and losses without MAE, less one each


def test_losses_that_guess_are_not_compared_and_lend_no_spread():
    column = cells_of(*METHODS, datasets=["svhn"], etas=[0.8])
    ours = made_up(lambda c: 30 if c.method == "tce:1" else 10, column, seeds=2, spread=3)
    ce, mse, tamed = (Cell("svhn", 0.8, method) for method in ("ce", "mse", "tce:1"))
    assert ours.compare("accuracy", mse, ce) is None
    assert ours.compare("accuracy", tamed, ce).mean == pytest.approx(20, abs=6)
    assert common_spread(ours, "svhn", 0.8) == (0, 0)  # one loss has no difference to others that learn


def test_gains_of_losses_that_guess_are_not_compared():
    both = cells_of("ce", "tce:1", "tce:2", datasets=["svhn"], etas=[0.0, 0.8])
    ours = made_up(lambda c: 80 - 3 * (c.method != "ce") if c.eta == 0 else 30 if c.method == "tce:2" else 10,
                   both, seeds=2, spread=0.1)
    clean, noisy = (Cell("svhn", eta, "tce:1") for eta in (0.0, 0.8))
    assert ours.compare("gain", noisy, clean) is None
    learned = ours.compare("gain", noisy._replace(method="tce:2"), clean._replace(method="tce:2"))
    assert learned.mean == pytest.approx(23, abs=1)


def test_every_comparison_of_a_claim_widens_its_intervals():
    class Wavering(Printed):
        "On the wrong side, by an interval that stands two comparisons and not four"
        def compare(self, quantity, first, second): return Estimate(-2.3, -4.3, -0.3, 3, 1e9)
    checks = BY_NAME["first-stage"].checks(Wavering())
    assert [check.outcome for check in checks[:2]] == [above(Estimate(-2.3, -4.3, -0.3, 3, 1e9), family=4)] * 2
    assert above(Estimate(-2.3, -4.3, -0.3, 3, 1e9), family=4) == OPEN != above(Estimate(-2.3, -4.3, -0.3, 3, 1e9), family=2)


def test_columns_that_share_the_clean_one_count_once():
    checks = BY_NAME["noise"].checks(Printed(), True)
    assert {check.place for check in checks} == {("mnist",), ("cifar10",), ("svhn",)}


def test_a_run_that_diverged_does_not_blind_its_column():
    frame, epochs = make_up(fair, spread=0.5)
    lost = (frame.method == "tce:1") & (frame.seed == 2)
    frame.loc[lost, ["selected", "diverged"]] = [math.nan, 7]
    before, after = (common_spread(Recorded(*runs), "cifar10", 0.4) for runs in (make_up(fair, spread=0.5), (frame, epochs)))
    assert after[0] < 1.5 * before[0] and after[1] < before[1]


def test_gains_are_compared_with_the_spreads_of_both_columns():
    ours = made_up(lambda c: fair(c) + 5 * c.eta * (c.method in TAMED), seeds=2, spread=0.5)
    noisy, clean = (Cell("cifar10", eta, "tce:1") for eta in (0.4, 0.0))
    (a, n), (b, m) = (common_spread(ours, *cell[:2]) for cell in (noisy, clean))
    found = ours.compare("gain", noisy, clean)
    assert found.df == pytest.approx((a**2 + b**2)**2 / (a**4 / n + b**4 / m)) and found.df > 5
    half = (found.high - found.low) / 2
    assert half >= 0.999 * stats.t.ppf(0.975, found.df) * math.hypot(a, b) / math.sqrt(2)


def test_slides_and_drops():
    cells = cells_of("ce", datasets=["cifar100"])
    losing = made_up(fair, slide=lambda c: 3 * c.eta + 1)
    assert judged(positive("slide", cells), losing) == judged(positive("drop", cells), losing) == SUPPORTED
    gaining = made_up(fair, slide=lambda c: -2.0)
    assert judged(positive("slide", cells), gaining) == CONTRADICTED
    assert judged(at_full_scale(positive("slide", cells), NO), gaining) == UNDECIDED
    more = larger("slide", [(cell, cell._replace(eta=0.0)) for cell in cells if cell.eta])
    assert judged(more, losing) == SUPPORTED


@pytest.mark.parametrize("scale, peak, expected", [
    ("paper", 0.9, SUPPORTED), ("cpu", 0.9, UNDECIDED), ("paper", 1.5, CONTRADICTED), ("cpu", 1.5, CONTRADICTED)])
def test_early_overfitting_can_be_refuted_at_any_scale_and_ruled_out_only_at_the_papers(scale, peak, expected):
    frame, epochs = make_up(fair, scale=scale)
    second_quarter = epochs.epoch.isin([3, 4])
    epochs.loc[second_quarter, "test_accuracy"] = epochs.test_accuracy[epochs.epoch == 8].to_numpy().repeat(2) * peak
    assert judge(BY_NAME["early"], Recorded(frame, epochs)).verdict == expected


@pytest.mark.parametrize("scale, accuracy, expected", [
    ("paper", 97, SUPPORTED), ("cpu", 97, SUPPORTED), ("paper", 90, CONTRADICTED), ("cpu", 90, UNDECIDED)])
def test_excellent_on_mnist(scale, accuracy, expected):
    assert judge(BY_NAME["mnist-easy"], made_up(lambda c: accuracy, scale=scale)).verdict == expected


def test_the_interval_of_a_spread_is_the_chi_squared_one():
    found = variation(8.0, 2.0, 4)  # by hand: 3 / 9.3484 and 3 / 0.2158 under the root
    assert (found.mean, found.n, found.df) == (25, 4, 3)
    assert (found.low, found.high) == pytest.approx((25 * 0.56649, 25 * 3.7286), rel=1e-3)
    ce = Cell("cifar10", 0.4, "ce")
    assert Printed().level("variation", ce).mean == pytest.approx(100 * 6.71303 / 5.57194)
    assert made_up(fair, seeds=1).level("variation", ce) is None  # one run has no spread
    never, epochs = make_up(fair)
    assert Recorded(never, epochs.assign(test_accuracy=0.1)).level("variation", ce) is None  # nor has "not yet"


@pytest.mark.parametrize("shifts, expected", [((1, 2, 4, 5, 8), SUPPORTED), ((2, 2, 2, 2, 2.01), CONTRADICTED)])
def test_runs_that_differ_in_speed(shifts, expected):
    frame, epochs = make_up(fair, spread=0)
    seed = epochs.name.str.split("-").str[1].astype(int)
    start = seed.map(dict(enumerate(shifts)))
    epochs["test_accuracy"] = ((epochs.epoch - start + 1) / 4).clip(0, 1) * 0.6
    epochs["lr"] = 0.1  # all of them at the first rate
    assert judge(BY_NAME["speed-varies"], Recorded(frame, epochs)).verdict == expected


def test_levels_above_and_below_a_limit():
    cell, ours = Cell("cifar10", 0.0, "ce"), made_up(fair)  # 60%
    found = [outcomes(levels("accuracy", {cell: limit}, rule), ours) for rule in (above, below) for limit in (50, 70)]
    assert found == [[YES], [NO], [NO], [YES]]


def test_together():
    one = positive("drop", cells_of("ce", datasets=["cifar100"]))
    assert len(together(one, one)(made_up(fair))) == 10


# what counts as evidence

def test_scales_are_never_mixed():
    small, _ = make_up(fair)
    full, _ = make_up(fair, cells_of("ce"), seeds=1, scale="paper")
    toys = [small.assign(scale=scale) for scale in ("digits", "smoke", "custom")]
    assert evidence(pd.concat(toys)).empty
    assert evidence_scale(pd.concat([*toys, small]), "mnist") == "cpu"
    both = pd.concat([small, full])
    assert evidence_scale(both, "mnist") == "paper" and set(evidence(both).scale) == {"paper"}
    assert evidence_scale(pd.concat([small, full.assign(hold_out=0.1)]), "mnist") == "cpu"


def test_a_run_at_the_papers_scale_takes_nothing_from_other_data_sets():
    small, epochs = make_up(fair)
    one, _ = make_up(fair, [Cell("mnist", 0.4, "ce")], seeds=1, scale="paper")
    both = pd.concat([small, one.assign(name="one")])
    assert evidence(both).groupby("dataset").scale.unique().map(list).to_dict() == {
        "cifar10": ["cpu"], "cifar100": ["cpu"], "svhn": ["cpu"], "mnist": ["paper"]}
    ours, flat = Recorded(both, epochs), at_full_scale(guessing(cells_of("ce")), NO)
    assert ours.full("mnist") and not ours.full("svhn")
    found = {check.place[0]: check.outcome for check in flat(ours)}  # all learn: against, where that is decided
    assert found["mnist"] == MISSING and found["svhn"] == OPEN
    assert "preset `paper`, the paper's own scale" in provenance(both) and "**not the paper's scale**" in provenance(both)


def test_runs_on_other_images_are_left_out():
    small, _ = make_up(fair)
    other = small[(small.seed == 0) & (small.dataset == "svhn")].assign(version="official", selected=1.0)
    assert len(evidence(pd.concat([other, small]))) == len(small)


def with_hold_out(gain, scale="cpu"):
    "One run on all images that shows no gain, and one that held images out and shows this one; both of seed 0"
    frame, epochs = make_up(fair, seeds=1, spread=0, scale=scale)
    held = frame.assign(hold_out=0.1, name=frame.name + "-held", selected=frame.selected - 0.05)
    held["selected"] += held.method.isin(TAMED) * gain / 100
    return Recorded(pd.concat([frame, held]), pd.concat([epochs, epochs.assign(name=epochs.name + "-held")]))


def test_hold_out_runs_of_small_scale_count_in_differences_only():
    ce, tamed = (Cell("cifar10", 0.4, method) for method in ("ce", "tce:1"))
    small, full = with_hold_out(4), with_hold_out(4, "paper")
    assert small.compare("accuracy", tamed, ce).mean == pytest.approx(2) and small.level("gain", tamed).n == 2
    assert small.level("accuracy", ce).mean == pytest.approx(fair(ce)) and small.level("accuracy", ce).n == 1
    assert small.level("speed", ce).n == 1 and small.level("drop", ce).n == small.level("slide", ce).n == 2
    assert small.level("variation", ce) is None  # other images, another speed
    clean, epochs = make_up(fair, seeds=1)
    held = clean.assign(hold_out=0.1, hold_out_noisy=False)
    assert Recorded(pd.concat([clean, held]), epochs).level("gain", tamed).n == 1  # chosen on labels nobody has
    assert full.level("gain", tamed).mean == 0 and full.level("gain", tamed).n == full.level("drop", ce).n == 1


def test_other_noise_does_not_count_but_without_noise_all_is_one():
    frame, _ = make_up(fair)
    assert set(evidence(frame.assign(noise="pair")).eta) == {0.0}


def test_a_diverged_run_counts_as_guessing():
    frame, epochs = make_up(fair, seeds=2, spread=0)
    lost = (frame.method == "tce:2") & (frame.seed == 0)
    frame["diverged"] = frame.diverged.mask(lost, 3)
    frame["selected"] = frame.selected.mask(lost)
    cell = Cell("cifar10", 0.0, "tce:2")
    assert Recorded(frame, epochs).level("accuracy", cell).mean == pytest.approx((60 + 10) / 2)
    unread = frame.assign(diverged=None)  # no epoch was selected for it yet: it is not there
    assert Recorded(unread, epochs).level("accuracy", cell).n == 1


def test_real_columns_are_enough():
    "An empty folder, and the project's own records"
    empty = pd.DataFrame(columns=COLUMNS), pd.DataFrame(columns=["name", "epoch", "test_accuracy"])
    for frame, epochs in (empty, (gather(), histories())):
        rows = audit(frame, epochs)
        assert {row.ours.verdict for row in rows.values()} <= set(VERDICTS)
        assert provenance(frame)


def test_records_are_read_as_they_are_written(tmp_path):
    jobs = plan("cpu", ["cifar100"], ["ce", "tce:0.5"], [0.4])
    made_up_records(jobs, tmp_path)
    frame, ours = gather(tmp_path), Recorded(gather(tmp_path), histories(tmp_path))
    ce, tamed = (Cell("cifar100", 0.4, method) for method in ("ce", "tce:0.5"))
    assert evidence_scale(frame, "cifar100") == "cpu" and "6 of 294 runs" in provenance(frame)
    ends = [accuracy_of(job.config) for job in jobs if job.config.loss == "ce" and job.needs]
    assert ours.level("accuracy", ce).mean == pytest.approx(100 * sum(ends) / 3)
    all_ends = [accuracy_of(job.config) for job in jobs if job.config.loss == "ce"]
    dropped = 100 * sum(all_ends) / 4 * (1 - 0.8 * 19 / 20)  # between epochs 19 and 20, in the hold-out run too
    assert ours.level("drop", ce).mean == pytest.approx(dropped)
    assert "2 runs that held images out" in provenance(frame)
    assert 15 < ours.level("speed", tamed).mean < 20 and ours.compare("speed", tamed, ce).mean < 0
    row = audit(frame, histories(tmp_path))["same-speed"]
    assert row.ours.verdict == UNDECIDED and row.ours.basis == "1 of 2 comparisons, 4 runs each"


# the claims

def test_there_are_enough_claims_and_all_is_said_of_each():
    assert len(CLAIMS) >= 14 and len(BY_NAME) == len(CLAIMS)
    for claim in CLAIMS:
        assert re.fullmatch(r"[a-z-]+", claim.name) and len(claim.title) <= 34
        assert claim.text.endswith(".") and claim.how.endswith(".")
        assert re.fullmatch(r"(Abstract|§\d(\.\d)?|Table \d|Fig\. \d)(, (§\d(\.\d)?|Table \d|Fig\. \d))*", claim.where)


def test_the_losses_of_a_column_are_one_place():
    "They share images and noise, so that they agree says less than that columns do"
    checks = [check for claim in CLAIMS for check in claim.checks(Printed())]
    assert {len(check.place) for check in checks if check.estimate and check.unit != "% time"} == {1, 2}


EXPECTED = {
    "best-alpha": SUPPORTED, "every-alpha": CONTRADICTED, "best-loss": SUPPORTED, "gains": SUPPORTED,
    "general": IN_PART, "noise": IN_PART, "clean": IN_PART, "moderate": IN_PART, "sensitivity": CONTRADICTED,
    "range": UNDECIDED, "trade-off": IN_PART, "mae": SUPPORTED, "hardest": CONTRADICTED, "mse-noise": IN_PART, "mse-like": IN_PART,
    "mnist-easy": SUPPORTED, "early": UNDECIDED, "speed-varies": UNDECIDED, "drop": UNDECIDED, "slide-clean": UNDECIDED, "slide-noise": UNDECIDED, "slide-loss": UNDECIDED,
    "first-stage": IN_PART, "same-speed": IN_PART, "all-speed": CONTRADICTED, "mse-slowest": IN_PART,
    "time": UNDECIDED}


@pytest.mark.parametrize("name", BY_NAME)
def test_verdicts_on_the_papers_own_numbers(name):
    assert judge(BY_NAME[name], Printed()).verdict == EXPECTED[name]


def against_it(name):
    return {check.label for check in BY_NAME[name].checks(Printed()) if check.outcome == NO}


def test_where_the_papers_tables_are_against_it():
    assert against_it("every-alpha") == {
        "CIFAR-10, η 0, α 1 vs CE", "CIFAR-10, η 0, α 1.5 vs CE", "CIFAR-10, η 0, α 2 vs CE",
        "CIFAR-10, η 0.8, α 1 vs CE", "CIFAR-100, η 0, α 2 vs CE", "CIFAR-100, η 0.8, α 2 vs CE",
        "SVHN, η 0.8, α 0.5 vs CE"}
    assert against_it("best-loss") == {"CIFAR-10, η 0, α 0.5"}
    assert against_it("mse-like") == {"CIFAR-100, η 0.8, MSE vs CE"}
    assert against_it("mse-noise") == {
        "CIFAR-100, η 0, MSE vs CE", "MNIST, η 0.4, MSE vs CE", "MNIST, η 0.8, CE vs MSE"}
    assert len(BY_NAME["mae"].checks(Printed())) == 9  # the others are blank


def test_numbers_of_the_paper_by_hand():
    paper = Printed()
    for (dataset, method), gain in {("cifar10", "tce:2"): 72.95 - 63.59, ("cifar100", "tce:1.5"): 30.10 - 20.30,
                                    ("svhn", "tce:2"): 90.44 - 85.50}.items():
        assert paper.level("gain", Cell(dataset, 0.8, method)).mean == pytest.approx(gain)
    slower = paper.compare("speed", Cell("cifar100", 0.4, "mse"), Cell("cifar100", 0.4, "ce"))
    assert slower.mean == pytest.approx(46.8294 - 18.8734) and slower.n == 6
    widths = {check.label: check.estimate.mean for check in BY_NAME["sensitivity"].checks(paper)}
    assert widths["CIFAR-100, η 0.8"] == pytest.approx(30.10 - 18.75)


def test_the_figures_means_are_not_of_five_runs():
    figure = paper_numbers("fig3").groupby("dataset").accuracy
    assert figure.apply(lambda means: runs_behind(means)).to_dict() == {"cifar10": 4, "cifar100": 6}
    assert runs_behind([54.42, 54.424]) == 5 and runs_behind([1 / 7], most=3) is None


def ideal(cell):
    "Accuracies of which every claim of the paper is true"
    if cell.method == "mae": return 100 / CLASSES[cell.dataset]
    if cell.dataset == "cifar100" and cell.eta == 0.8 and cell.method in ("mse", "tce:2"): return 1.0
    if cell.method == "mse": return fair(cell) + (0.3 if cell.eta <= 0.4 else -0.3)
    steps = {"tce:0.5": 0.7, "tce:1": 0.8, "tce:1.5": 1.0, "tce:2": 0.9}
    return fair(cell) + steps.get(cell.method, 0) * (1 + cell.eta)


def test_claims_come_true_where_they_are():
    ours = made_up(ideal, scale="paper", slide=lambda c: (2 if c.method == "ce" else 1) * (0.5 + c.eta),
                   delay=lambda c: {"mse": 1.13, "tce:2": 1.1, "tce:1.5": 1.05}.get(c.method, 1.0))
    found = {name: judge(claim, ours).verdict for name, claim in BY_NAME.items()}
    true = {name for name in found if found[name] == SUPPORTED}
    assert true >= {"best-alpha", "best-loss", "mae", "mse-noise",
                    "drop", "slide-clean", "slide-loss", "same-speed", "mse-slowest"}, found
    partly = {"trade-off", "moderate", "slide-noise", "clean", "first-stage"}  # all that their comparisons can say
    assert {found[name] for name in partly} == {IN_PART} and found["range"] == UNDECIDED
    assert found["gains"] == CONTRADICTED  # these gains are smaller
    assert found["time"] == UNDECIDED  # no benchmark given


@pytest.mark.parametrize("cells, seeds", [([], 0), (ALL[:3], 1), (ALL[:20], 3), (ALL, 1), (ALL, 2)])
@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_every_claim_can_be_judged_with_any_number_of_records(cells, seeds, scale):
    frame, epochs = make_up(ideal, ALL, scale=scale, seeds=max(seeds, 1), spread=0.5)
    frame = frame[[Cell(*key) in cells for key in zip(frame.dataset, frame.eta, frame.method)]]
    rows = audit(frame, epochs[epochs.name.isin(frame.name)])
    assert len(rows) == len(CLAIMS)
    for row in rows.values():
        assert row.ours.verdict in VERDICTS and row.ours.effect and row.ours.basis
        assert "nan" not in section(row) and row.claim.text in section(row)
        if seeds < 2 and row.claim.name != "time": assert row.ours.verdict == UNDECIDED
    assert summary(rows).count("\n") == len(CLAIMS) + 1
    if len(frame): assert f"{len(frame):,} of" in provenance(frame) and f"`{scale}`" in provenance(frame)
    assert ("not the paper's scale" in provenance(frame)) == (scale == "cpu" and len(frame) > 0)


@pytest.mark.parametrize("low, high, expected", [
    (0.95, 1.05, IN_PART), (1.2, 1.3, CONTRADICTED), (0.95, 1.3, UNDECIDED)])
def test_time_comes_from_the_benchmark(low, high, expected):
    row = dict(name="TCE / CE epoch of the trainer", ratio=(low + high) / 2, low=low, high=high, rounds=10)
    nothing = make_up(fair)[0][:0], make_up(fair)[1][:0]
    assert judge(BY_NAME["time"], Recorded(*nothing, dict(rows=[row]))).verdict == expected
    assert judge(BY_NAME["time"], Recorded(*nothing, dict(rows=[]))).verdict == UNDECIDED
    assert judge(BY_NAME["time"], Recorded(*nothing)).verdict == UNDECIDED


def test_the_chapter_has_a_section_for_each_claim_and_types_no_verdict():
    cells = json.loads((ROOT/"nbs/paper/07_audit.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    sections = dict(re.findall(r"\(claim-([a-z-]+)\)=\n### (.+)", text))
    assert sections == {claim.name: claim.title for claim in CLAIMS}
    for name in sections: assert f'section(rows["{name}"])' in text
    typed = ["".join(cell["source"]) for cell in cells if "".join(cell["source"]).startswith("(claim-")]
    assert len(typed) == len(CLAIMS) and not any(word in text for text in typed for word in VERDICTS)
