"""Losses by name: the command line's words, files of one's own, and mistakes."""
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tce_nb import LOSSES, TamedCrossEntropyLoss, get_loss, tamed_cross_entropy
from tce_nb.registry import has_alpha, split_loss

LOGITS, TARGET = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])


def settings(name): return dict(transition=torch.eye(5)) if name == "forward" else {}


@pytest.mark.parametrize("name", LOSSES)
def test_every_name_gives_a_loss(name):
    loss, before = get_loss(name, reduction="none", weight=torch.rand(5), **settings(name)), (LOGITS.clone(), TARGET.clone())
    assert isinstance(loss, nn.CrossEntropyLoss) and loss(LOGITS, TARGET).isfinite().all()
    assert torch.equal(LOGITS, before[0]) and torch.equal(TARGET, before[1])
    assert copy.deepcopy(loss).double().weight.dtype == torch.float64
    assert getattr(loss, "needs_transition", False) == (name == "forward")
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert repr(twin) == repr(loss)
        assert_close(twin(LOGITS, TARGET), loss(LOGITS, TARGET))
    with pytest.raises(ValueError, match="reduction: got 'avg'"):
        get_loss(name, reduction="avg", **settings(name))


@pytest.mark.parametrize("word, alpha, normalize", [
    ("tce", 1.5, False), ("tce:1", 1, False), (" TCE:0.5 ", 0.5, False), ("Tce: 2", 2, False),
    ("ntce", 1.5, True), ("ntce:1", 1, True), ("NTCE:0", 0, True)])
def test_the_words_of_the_command_line(word, alpha, normalize):
    loss = get_loss(word, reduction="sum")
    assert type(loss) is TamedCrossEntropyLoss and has_alpha(split_loss(word)[0])
    assert loss.alpha == alpha and loss.normalize is normalize
    expected = tamed_cross_entropy(LOGITS, TARGET, alpha, reduction="sum", normalize=normalize)
    assert_close(loss(LOGITS, TARGET), expected)


def test_what_a_loss_says_of_itself():
    assert repr(get_loss("ntce", alpha=1.0)) == repr(get_loss("ntce:1")) == "TamedCrossEntropyLoss(alpha=1.0, normalize=True)"
    assert repr(get_loss("sce", beta=2)) == "SymmetricCrossEntropyLoss(log_zero=-4.0, alpha=0.1, beta=2.0)"
    assert repr(get_loss("smoothing")) == "SmoothedCrossEntropyLoss()"
    assert [name for name in LOSSES if has_alpha(name)] == ["tce", "ntce"]


@pytest.mark.parametrize("word, options, kind, message", [
    ("tc", {}, ValueError, r"loss: got 'tc', expected one of ce, mse, mae, tce, ntce.*; did you mean \w+\?"),
    ("tec:1.5", {}, ValueError, "loss: got 'tec', .*FILE.py:NAME; did you mean tce?"),
    ("xyz", {}, ValueError, "loss: got 'xyz', .*FILE.py:NAME$"),
    (["ce"], {}, ValueError, "loss: got .*'ce'.*, expected one of"),
    (None, {}, ValueError, "loss: got 'none', expected one of"),
    ("ce:1.5", {}, ValueError, "loss: got 'ce:1.5', expected 'ce' alone: a number after the colon is the alpha of tce"),
    ("sce:1", {}, ValueError, "loss: got 'sce:1', expected 'sce' alone"),
    ("tce:", {}, ValueError, "loss: got 'tce:', expected a number after 'tce:'"),
    ("tce:big", {}, ValueError, "loss: got 'tce:big', expected a number after 'tce:'"),
    ("tce:-1", {}, ValueError, "alpha: got -1.0, expected a finite number >= 0"),
    ("tce:nan", {}, ValueError, "alpha: got nan, expected a finite number >= 0"),
    ("tce:1", dict(alpha=1.5), TypeError, ".* got multiple values for keyword argument 'alpha'"),
    ("gce", dict(alpha=1), TypeError, ".* got an unexpected keyword argument 'alpha'"),
])
def test_a_mistake_is_named(word, options, kind, message):
    with pytest.raises(kind, match=f"^{message}"): get_loss(word, **options)
