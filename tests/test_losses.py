"""Tamed Cross Entropy against its definition; what it shares with the other losses is in test_robust_losses."""
import math
import os
import shutil
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.testing import assert_close

from tce_nb import TamedCrossEntropyLoss, get_loss, tame, tamed_cross_entropy

SHAPES = [(5,), (7, 5), (1, 5), (3, 5, 4), (2, 5, 3, 4), (2, 5, 2, 2, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ALPHAS = [0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0]
REDUCTIONS = ["none", "mean", "sum"]


def example(shape, soft, dtype=torch.float32, seed=0):
    "Logits and a target for them"
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator)
    dim = min(1, len(shape) - 1)
    if soft:
        target = torch.randn(shape, generator=generator).softmax(dim).to(dtype)
    else:
        size = shape[:dim] + shape[dim + 1:]
        target = torch.randint(shape[dim], size, generator=generator)
    return logits.to(dtype).requires_grad_(), target


def value_and_gradient(loss, logits):
    gradient, = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


def by_hand(each, logits, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    "One sample after the other in float64; `each` is a sample's loss of its logits, smoothed and given target, weights"
    dim = min(1, logits.dim() - 1)
    k, soft = logits.shape[dim], target.shape == logits.shape
    rows = logits.detach().double().movedim(dim, -1).reshape(-1, k)
    targets = (target.movedim(dim, -1).reshape(-1, k) if soft else target.reshape(-1)).tolist()
    w, losses, counted = [1.0] * k if weight is None else weight.tolist(), [], 0.0
    for row, t in zip(rows, targets):
        ignored = not soft and t == ignore_index
        given = t if soft else [float(i == t) for i in range(k)]
        p = [(1 - label_smoothing) * x + label_smoothing / k for x in given]
        losses.append(0.0 if ignored else each(row, p, given, w))
        counted += 1.0 if soft else 0.0 if ignored else w[t]
    if reduction == "none":
        shape = [n for i, n in enumerate(logits.shape) if i != dim]
        return torch.tensor(losses, dtype=torch.float64).view(shape)
    total = torch.tensor(math.fsum(losses), dtype=torch.float64)
    return total if reduction == "sum" else total / (counted or math.nan)  # torch: the mean of nothing is nan


def tamed(alpha):
    "The definition for one sample: the sum over classes of `p` times the Box-Cox transform"
    def each(row, p, given, w):
        return sum(a * b * boxcox(-log_q, alpha) for a, b, log_q in zip(w, p, row.log_softmax(0).tolist()))
    return each


def boxcox(ce, alpha):
    return math.log1p(ce) if alpha == 1 else ((1 + ce) ** (1 - alpha) - 1) / (1 - alpha)


@settings(max_examples=200)
@given(data=st.data())
def test_random_calls_match_the_definition(data):
    k = data.draw(st.integers(1, 6), label="classes")
    extra = data.draw(st.lists(st.integers(1, 3), max_size=2), label="extra")
    shape = data.draw(st.sampled_from(
        [(k,), (data.draw(st.integers(1, 4)), k, *extra)]), label="shape")
    soft = data.draw(st.booleans(), label="soft")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    # next to 1 the definition, taken literally, loses its digits: 0 / 0
    alphas = st.floats(0, 6).filter(lambda a: a == 1 or abs(a - 1) > 1e-6)
    alpha = data.draw(st.sampled_from(ALPHAS) | alphas, label="alpha")
    logits, target = example(shape, soft, dtype, data.draw(st.integers(0, 99)))
    weight = data.draw(st.sampled_from([None, torch.linspace(0, 2, k).to(dtype)]))
    options = dict(
        weight=weight,
        ignore_index=data.draw(st.sampled_from([-100, -1] if soft else [-100, 0])),
        reduction=data.draw(st.sampled_from(REDUCTIONS)),
        label_smoothing=data.draw(st.sampled_from([0.0, 0.2, 1.0]) | st.floats(0, 1)))
    normalize = data.draw(st.booleans(), label="normalize")
    loss = tamed_cross_entropy(logits, target, alpha, **options, normalize=normalize)
    value, gradient = value_and_gradient(loss, logits)
    expected = by_hand(tamed(alpha), logits, target, **options) * (1 + math.log(k)) ** (alpha * normalize)
    rtol, atol = {torch.float64: (1e-7, 1e-8), torch.float32: (2e-5, 2e-6)}.get(dtype, (3e-2, 3e-2))
    assert_close(value.double(), expected, equal_nan=True, rtol=rtol, atol=atol)
    assert gradient.dtype == logits.dtype and (gradient.isfinite().all() or value.isnan().any())


@given(ce=st.floats(0, 1e4), alpha=st.floats(0, 8), other=st.floats(0, 8))
def test_tame_compresses(ce, alpha, other):
    loss = torch.tensor(ce, dtype=torch.float64)
    low, high = sorted((alpha, other))
    slack = 1e-12 * (1 + ce)
    assert 0 <= tame(loss, high) <= tame(loss, low) + slack <= ce + 2 * slack
    if high > 1: assert tame(loss, high) <= 1 / (high - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_value_and_slope_are_exact_to_the_last_digits(dtype):
    eps = torch.finfo(dtype).eps
    ce = torch.logspace(-7, 4, 500, dtype=dtype).requires_grad_()
    wide = ce.detach().double()
    for alpha in (1e-9, 0.1, 0.5, 1 - 1e-6, 1 - 1e-12, 1.0, 1 + 1e-12, 1.5, 2.0, 5.0):
        value, slope = value_and_gradient(tame(ce, alpha), ce)
        assert_close(slope.double(), (1 + wide) ** -alpha, rtol=60 * eps, atol=0)
        exact = torch.log1p(wide) if alpha == 1 else torch.expm1((1 - alpha) * torch.log1p(wide)) / (1 - alpha)
        assert_close(value.double(), exact, rtol=60 * eps, atol=0)


# inductor needs a C++ compiler, and torch in a folder without spaces
CAN_COMPILE = shutil.which(os.environ.get("CXX", "g++")) and " " not in torch.__file__
BACKENDS = ["aot_eager"] + ["inductor"] * bool(CAN_COMPILE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_without_graph_breaks(backend):
    extra = dict(weight=torch.rand(5), label_smoothing=0.1, normalize=True)
    for soft, options, alphas in ((False, dict(ignore_index=1), (0.5, 1.5, 1.0, 0.0)), (True, extra, (1.5, 1.0))):
        torch.compiler.reset()
        compiled = torch.compile(tamed_cross_entropy, fullgraph=True, backend=backend)
        logits, target = example((16, 5), soft)
        for alpha in alphas[:2] if backend == "inductor" else alphas:  # C++ is slow to build
            results = [value_and_gradient(loss(logits, target, alpha, **options), logits)
                       for loss in (compiled, tamed_cross_entropy)]
            assert_close(*results)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "soft"])
def test_forward_mode_and_hessian(alpha, soft):
    logits, target = example((6, 5), soft)
    logits = logits.detach()
    def loss(x, t): return tamed_cross_entropy(x, t, alpha)
    hessian = torch.func.hessian(loss)(logits[0].double(), target[0])
    assert hessian.shape == (5, 5) and hessian.isfinite().all()
    assert_close(hessian, hessian.T)
    assert_close(hessian, torch.func.jacrev(torch.func.jacfwd(loss))(logits[0].double(), target[0]))
    for smoothing, x, t in ((0.0, logits[0], target[0]), (0.1, logits, target)):
        def smooth(x, t, smoothing=smoothing): return tamed_cross_entropy(x, t, alpha, label_smoothing=smoothing)
        assert_close(torch.func.jacfwd(smooth)(x, t), torch.func.jacrev(smooth)(x, t))  # of one dtype


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_gradient_of_probabilities_in_every_mode(alpha):
    logits, target = example((6, 5), soft=True, dtype=torch.float64)
    logits, target, weight = logits.detach(), target.requires_grad_(), torch.rand(5, dtype=torch.float64)
    def loss(x, t): return tamed_cross_entropy(x, t, alpha, weight, label_smoothing=0.1, reduction="sum")
    def plain(x, t):
        terms = tame(-x.log_softmax(1), alpha) * weight
        return ((0.9 * t + 0.1 / 5) * terms).sum()
    modes = (torch.func.jacrev, torch.func.jacfwd, lambda f, argnums: torch.func.jacfwd(torch.func.jacrev(f, argnums), 0),
             lambda f, argnums: torch.func.jacrev(torch.func.jacfwd(f, argnums), 1))
    for mode, argnum in product(modes, (0, 1)):
        assert_close(mode(loss, argnums=argnum)(logits, target), mode(plain, argnums=argnum)(logits, target))
    x = logits.clone().requires_grad_()  # a batch of backward passes at once
    each = tamed_cross_entropy(x, target, alpha, reduction="none")
    rows, = torch.autograd.grad(each, x, torch.eye(6, dtype=x.dtype), is_grads_batched=True, retain_graph=True)
    assert_close(rows.sum(0), torch.autograd.grad(each.sum(), x)[0])
    shared = torch.func.vmap(lambda t: tamed_cross_entropy(logits[0], t, alpha))(target)
    assert_close(shared, tamed_cross_entropy(logits[:1].expand(6, 5), target, alpha, reduction="none"))


@pytest.mark.parametrize("name", ["tce", "mse"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_single_samples(name, smoothing):
    logits, target = example((6, 5), soft=False)
    target[2] = -100
    weight = torch.rand(5, generator=torch.Generator().manual_seed(0)) + 0.1
    each = get_loss(name, weight=weight, label_smoothing=smoothing, reduction="sum")
    single = torch.func.vmap(torch.func.grad(each))(logits.detach(), target)
    assert_close(single, torch.autograd.grad(each(logits, target), logits)[0])
    torch.compiler.reset()
    compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
    assert_close(compiled(logits[0], target[0]), each(logits[0], target[0]))


@pytest.mark.parametrize("classes, alpha", [*product((1, 2, 100), (0.0, 0.5, 1.0, 1.5))])
def test_normalised_an_untrained_network_has_cross_entropys_gradient(classes, alpha):
    logits = torch.zeros(6, classes, dtype=torch.float64, requires_grad=True)
    soft = torch.rand(6, classes, dtype=torch.float64).softmax(1)
    for target, weight, smoothing in product(
            (torch.arange(6) % classes, soft), (None, torch.rand(classes).double()), (0.0, 0.1)):
        options = dict(weight=weight, label_smoothing=smoothing)
        ours = tamed_cross_entropy(logits, target, alpha, normalize=True, **options)
        _, gradient = value_and_gradient(ours, logits)
        assert_close(gradient, value_and_gradient(F.cross_entropy(logits, target, **options), logits)[1])


def test_module_is_a_cross_entropy_loss():
    weight = torch.rand(5)
    criterion = TamedCrossEntropyLoss(1.0, weight, 3, "sum", 0.1)
    logits, target = example((6, 5), soft=False)
    before = logits.detach().clone(), target.clone()
    loss = criterion(logits, target)
    loss.backward()
    assert_close(loss, tamed_cross_entropy(logits, target, 1.0, weight, 3, "sum", 0.1))
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1])
    assert list(criterion.state_dict()) == list(nn.CrossEntropyLoss(weight).state_dict())
    for alpha in (1, np.float32(1.0), np.int64(1)):
        assert_close(tamed_cross_entropy(logits, target, alpha, weight, 3, "sum", 0.1), loss)
    assert repr(TamedCrossEntropyLoss()) == "TamedCrossEntropyLoss(alpha=1.5)"
    with pytest.raises(TypeError, match=r"^alpha: got torch.float32 of shape \(5,\), .*class weights go into weight="):
        TamedCrossEntropyLoss(weight)


def test_a_weight_of_another_dtype_is_taken_at_every_alpha():
    logits, target = example((6, 5), False, torch.float32)
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    expected = F.cross_entropy(logits.double(), target, weight)
    for alpha in (0, 1e-9):
        assert_close(tamed_cross_entropy(logits, target, alpha, weight).double(), expected)
    half = tamed_cross_entropy(logits.bfloat16(), target, 0, weight.float())
    assert half.dtype == torch.bfloat16 and abs(half.item() - expected.item()) < 0.05


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_ignored_label_is_ignored_whatever_the_weights(reduction):
    logits, target = torch.randn(3, 3, requires_grad=True), torch.tensor([1, 2, -100])
    weight = torch.tensor([math.inf, 1.0, 1.0])  # a class that never comes up
    expected = value_and_gradient(F.cross_entropy(logits, target, weight, reduction=reduction), logits)
    ours = value_and_gradient(tamed_cross_entropy(logits, target, 1e-12, weight, reduction=reduction), logits)
    for a, b in zip(ours, expected): assert_close(a, b)


@pytest.mark.parametrize("loss", ["tce", "mse", "gce"])
def test_export_with_images_of_any_size(loss):
    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = get_loss(loss, weight=torch.linspace(0.5, 2, 5))
        def forward(self, logits, target): return self.loss(logits, target)
    n, height, width = (torch.export.Dim(name) for name in ("n", "height", "width"))
    shapes = {0: n, 2: height, 3: width}, {0: n, 1: height, 2: width}
    exported = torch.export.export(WithLoss(), example((2, 5, 6, 7), False), dynamic_shapes=shapes).module()
    logits, target = example((3, 5, 5, 9), False)
    assert_close(exported(logits, target), WithLoss()(logits, target))


