"""Every loss, over the cross product of what it takes, against its equation written out."""
import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_losses import BACKENDS, DTYPES, REDUCTIONS, SHAPES, boxcox, by_hand, example, value_and_gradient
from torch import nn
from torch.testing import assert_close

from tce_nb import LOSSES, get_loss, softmax_mae, softmax_mse, tamed_cross_entropy
from tce_nb.robust_losses import ForwardCorrectedLoss, tempered_log_softmax

TRANSITION = torch.tensor([[.6, .4, 0, 0, 0], [.1, .7, .1, .1, 0], [0, 0, 1, 0, 0],
                           [.2, .2, .2, .2, .2], [.5, 0, 0, 0, .5]], dtype=torch.float64)
NAMES = [name for name in LOSSES if name != "ce"]  # which is PyTorch's own
OTHERS = [("tce", dict(alpha=1.0)), ("tce", dict(alpha=0.5)), ("gce", dict(exponent=0)), ("gce", dict(exponent=1)), ("truncated_gce", dict(threshold=0.1)),
          ("phuber", dict(tau=10)), ("taylor", dict(order=6)), ("focal", dict(gamma=0.5)), ("nfl", dict(gamma=2)),
          ("rce", dict(log_zero=math.log(1e-4))), ("sce", dict(alpha=6, beta=0.1)),
          ("nce_rce", dict(alpha=10, beta=0.1)), ("nce_mae", dict(alpha=10)), ("js", dict(pi=0.3)),
          ("bitempered", dict(t1=0.5, t2=4)), ("bitempered", dict(t1=1, t2=1.1)), ("bootstrap_hard", dict(beta=0.5))]
CASES = [(name, {}) for name in NAMES] + OTHERS
WEIGHT = torch.tensor([0.5, 1.5, 1.0, 0.0, 3.0], dtype=torch.float64)


def build(name, **options):
    "A loss by its name; forward correction is the one that needs more than that"
    if name == "forward": options = dict(transition=TRANSITION, **options)
    return get_loss(name, **options)


def identify(case): return case if isinstance(case, str) else "-".join(f"{k}{v:g}" for k, v in case.items())


# the core that all share is tested on cross entropy, in the notebook: here each loss takes each of two ways through it
WAYS = [(False, 0.0), (True, 0.1)]
each_case = pytest.mark.parametrize("name, settings", CASES, ids=identify)
each_loss = pytest.mark.parametrize("name", NAMES)


def probabilities(name, row, t2=1.2, **_):
    "What the network says of one sample"
    if name == "forward":
        q = row.softmax(0)
        return [sum(q[i].item() * TRANSITION[i, j].item() for i in range(5)) for j in range(5)]
    if name != "bitempered" or t2 == 1: return row.softmax(0).tolist()
    a, low, high = row.tolist(), max(row.tolist()), max(row.tolist()) + len(row) ** (t2 - 1) / (t2 - 1)
    def tempered(norm): return [(1 + (t2 - 1) * (norm - x)) ** (-1 / (t2 - 1)) for x in a]
    for _ in range(200):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if sum(tempered(middle)) > 1 else (low, middle)
    return tempered((low + high) / 2)


def focal(q, gamma): return -(1 - q) ** gamma * math.log(q)


def costs(name, q, **settings):
    "The equations for a label, word for word: the cost of each class"
    get, every = settings.get, range(len(q))
    nce = [math.log(x) / sum(map(math.log, q)) for x in q]
    entropy = -sum(x * math.log(x) for x in q)
    def box_cox(x, t): return (1 - x ** t) / t if t else -math.log(x)
    def huber(x, tau): return -math.log(x) if x > 1 / tau else math.log(tau) + 1 - tau * x
    t1, gce, k = get("t1", 0.8), get("exponent", 0.7), get("threshold", 0.5)
    soft, hard = get("beta", 0.95), get("beta", 0.8)
    def tce(x): return boxcox(-math.log(x), get("alpha", 1.5))
    bregman = (1 - sum(x ** (2 - t1) for x in q)) / (2 - t1)
    return {
        "tce": lambda i: tce(q[i]), "ntce": lambda i: (1 + math.log(len(q))) ** 1.5 * tce(q[i]),
        "gce": lambda i: box_cox(q[i], gce),
        "truncated_gce": lambda i: box_cox(max(q[i], k), gce),
        "phuber": lambda i: huber(q[i], get("tau", 2)),
        "taylor": lambda i: sum((1 - q[i]) ** n / n for n in range(1, get("order", 2) + 1)),
        "focal": lambda i: focal(q[i], get("gamma", 2)),
        "nce": lambda i: nce[i],
        "nfl": lambda i: focal(q[i], get("gamma", 0.5)) / sum(focal(x, get("gamma", 0.5)) for x in q),
        "sce": lambda i: -get("alpha", 0.1) * math.log(q[i]),
        "nce_rce": lambda i: get("alpha", 1) * nce[i],
        "nce_mae": lambda i: get("alpha", 1) * nce[i],
        "bitempered": lambda i: box_cox(q[i], 1 - t1) - bregman,
        "smoothing": lambda i: -math.log(q[i]),
        "bootstrap_soft": lambda i: -soft * math.log(q[i]) + (1 - soft) * entropy,
        "bootstrap_hard": lambda i: -hard * math.log(q[i]) - (1 - hard) * math.log(max(q)),
        "forward": lambda i: -math.log(q[i]) if q[i] else math.inf,
    }.get(name, lambda i: 0.0), every


def distance(name, p, q, **settings):
    "The equations for a distribution, word for word"
    get = settings.get
    def kl(a, b): return sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)
    rce = -sum(x * (max(math.log(y), get("log_zero", -4)) if y else get("log_zero", -4)) for x, y in zip(q, p))
    if name in ("mse", "mae"): return sum(abs(x - y) ** (2 if name == "mse" else 1) for x, y in zip(p, q))
    if name == "rce": return rce
    if name in ("sce", "nce_rce"): return get("beta", 1) * rce
    if name == "nce_mae": return get("beta", 1) * sum(abs(x - y) for x, y in zip(p, q)) / 2
    if name != "js": return 0.0
    pi = get("pi", 0.7)
    m = [pi * x + (1 - pi) * y for x, y in zip(p, q)]
    return (pi * kl(p, m) + (1 - pi) * kl(q, m)) / (-(1 - pi) * math.log(1 - pi))


def by_equation(name, **settings):
    "The loss of one sample: the expected cost, and the distance times the expected weight"
    def each(row, p, given, w):
        q = probabilities(name, row, **settings)
        cost, every = costs(name, q, **settings)
        linear = sum(w[i] * p[i] * cost(i) for i in every if p[i])
        return linear + sum(w[i] * given[i] for i in every) * distance(name, p, q, **settings)
    return each


@pytest.mark.parametrize("option, value", [("reduction", "None"), ("label_smoothing", 5.0)])
def test_an_option_that_is_set_later_is_checked_too(option, value):
    loss = get_loss("gce")
    setattr(loss, option, value)
    with pytest.raises(ValueError, match=f"{option}: got {value!r}, expected"):
        loss(torch.randn(3, 5), torch.tensor([0, 1, 2]))


@each_case
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "soft"])
def test_matches_its_equation(name, settings, soft):
    for shape, reduction in zip(SHAPES, [*REDUCTIONS, *REDUCTIONS]):
        logits, target = example(shape, soft, torch.float64)
        for weight, ignored, smoothing in product([None, WEIGHT], [-100] if soft else [1], [0.0, 0.2]):
            if not soft and target.numel() > 1: target.view(-1)[0] = ignored
            options = dict(weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
            assert_close(build(name, **settings, **options)(logits, target),
                         by_hand(by_equation(name, **settings), logits, target, **options), equal_nan=True)


@each_case
@pytest.mark.parametrize("soft, smoothing", WAYS, ids=["indices", "soft"])
def test_gradients_and_theirs_agree_with_finite_differences(name, settings, soft, smoothing):
    logits, target = example((2, 5), soft, torch.float64)
    loss = build(name, **settings, weight=torch.rand(5, dtype=torch.float64) + 0.1, label_smoothing=smoothing)
    def of_logits(x): return loss(x, target)
    assert torch.autograd.gradcheck(of_logits, logits)
    assert torch.autograd.gradgradcheck(of_logits, logits)


@each_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_stay_finite(name, settings, dtype):
    x = torch.tensor([[1e4, -1e4, 0.0, 5.0, 0.0], [-1e4, 1e4, 0.0, 1e4, 0.0], [0.0] * 5, [1e4] * 5],
                     dtype=dtype, requires_grad=True)
    soft = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]).expand(4, 5)
    for target, smoothing in product((torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 2, 3]), soft), (0.0, 0.1)):
        loss = build(name, **settings, label_smoothing=smoothing, reduction="none")
        value, gradient = value_and_gradient(loss(x, target), x)
        overflows = name == "sce" and dtype == torch.float16  # six times cross entropy
        assert overflows or value.isfinite().all() or name == "forward"  # some of its labels cannot be
        assert gradient.isfinite().all()


@each_loss
def test_masked_classes_have_no_gradient(name):
    x = torch.tensor([[2.0, 0.0, -math.inf, 1.0, -math.inf]], requires_grad=True)
    for target, smoothing in product((torch.tensor([0]), torch.tensor([2]), torch.tensor([[.5, .5, 0, 0, 0]])),
                                     (0.0, 0.1)):
        loss = build(name, label_smoothing=smoothing)(x, target)
        _, gradient = value_and_gradient(loss, x)
        assert not loss.isnan() and gradient.isfinite().all()


def test_a_label_that_cannot_be_leaves_the_rest_alone():
    "A column of zeros: no class is ever given this label"
    never = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    loss = ForwardCorrectedLoss(never, reduction="none")
    x = torch.randn(2, 3, requires_grad=True)
    value, gradient = value_and_gradient(loss(x, torch.tensor([0, 2])), x)
    assert value[0].isfinite() and value[1] > 1e30
    assert gradient[0].abs().sum() > 0 and (gradient[1] == 0).all()


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_32_bits(name, settings, dtype):
    for soft, smoothing in WAYS:
        logits, target = example((200, 5), soft, dtype)
        weight = torch.linspace(0.1, 3, 5).to(dtype)
        result = build(name, **settings, weight=weight, label_smoothing=smoothing)(logits, target)
        wide = build(name, **settings, weight=weight.double(), label_smoothing=smoothing)
        exact = wide(logits.double(), target.double() if soft else target)
        assert result.dtype == dtype
        assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


@each_loss
def test_dtypes_mix_as_in_torch(name):
    for a, b in product(DTYPES, repeat=2):
        (logits, target), weight = example((6, 5), True, a), torch.rand(5).to(b)
        theirs = F.cross_entropy(logits, target.to(b), weight)
        assert build(name, weight=weight)(logits, target.to(b)).dtype == theirs.dtype
        assert build(name, weight=weight.to(a))(logits, target.argmax(1)).dtype == a


@each_loss
def test_autocast_returns_float32_and_trains(name):
    net = nn.Linear(6, 5)
    soft = torch.full((2, 5), 0.2, dtype=torch.bfloat16)
    for target in (torch.tensor([0, 3]), soft):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(torch.randn(2, 6))
            loss = build(name)(logits, target)
            assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
        loss.backward()
    assert net.weight.grad.isfinite().all()


@each_loss
def test_nothing_to_learn_from_is_as_in_torch(name):
    x = torch.randn(4, 5, 2, requires_grad=True)
    ignored = torch.full((4, 2), -100)
    empty, none = torch.randn(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.long)
    for reduction in REDUCTIONS:
        loss, theirs = build(name, reduction=reduction), nn.CrossEntropyLoss(reduction=reduction)
        for logits, target in ((x, ignored), (empty, none)):
            value, gradient = value_and_gradient(loss(logits, target), logits)
            assert_close(value, theirs(logits, target), equal_nan=True)
            assert (gradient == 0).all()


@each_loss
def test_byte_labels_and_meta_tensors(name):
    logits, target = example((6, 5), soft=False)
    assert_close(build(name)(logits, target.byte()), build(name)(logits, target))
    meta = build(name).to("meta")
    assert meta(logits.to("meta"), target.to("meta")).is_meta


@pytest.mark.parametrize("name, way, backend", [(name, 0, 0) for name in NAMES] + [
    (name, 1, 0) for name in ("gce", "js", "bitempered", "forward")] + [("bitempered", 0, -1)])
def test_compiles_without_graph_breaks(name, way, backend):
    torch.compiler.reset()
    soft, smoothing = WAYS[way]
    loss = build(name, weight=torch.rand(5), ignore_index=-1 if soft else 1, label_smoothing=smoothing)
    compiled = torch.compile(loss, fullgraph=True, backend=BACKENDS[backend])
    logits, target = example((16, 5), soft)
    assert_close(*(value_and_gradient(f(logits, target), logits) for f in (compiled, loss)))


@each_loss
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "soft"])
def test_function_transforms(name, soft):
    logits, target = example((6, 5), soft)
    loss, logits = build(name), logits.detach()
    assert_close(torch.func.vmap(loss)(logits, target), build(name, reduction="none")(logits, target))
    x = logits.clone().requires_grad_()
    whole, = torch.autograd.grad(build(name, reduction="sum")(x, target), x)
    assert_close(torch.func.vmap(torch.func.grad(loss))(logits, target), whole)


LOGITS, LABELS = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
FUNCTIONS = {"tce": tamed_cross_entropy, "mse": softmax_mse, "mae": softmax_mae}


@pytest.mark.parametrize("arguments, kind, message", [
    (dict(reduction="avg"), ValueError, "reduction: got 'avg', expected 'none', 'mean' or 'sum'"),
    (dict(label_smoothing=1.5), ValueError, "label_smoothing: got 1.5, expected a number from 0 to 1"),
    (dict(label_smoothing="a"), TypeError, "label_smoothing: got 'a'"),
    (dict(weight=[1.0] * 5), TypeError, "weight: got list"),
    (dict(weight=torch.ones(4)), ValueError, "weight: got 4 weights, expected one for each of the input's 5"),
    (dict(weight=torch.ones(5, dtype=int)), TypeError, "weight: got torch.int64"),
    (dict(weight=torch.ones(1, 5)), TypeError, "weight: got torch.float32 of shape (1, 5)"),
    (dict(target=LABELS.float()), TypeError, "target: got torch.float32, expected int64"),
    (dict(target=LABELS[:3]), ValueError, "target: got shape (3,), expected (4,) (indices) or (4, 5)"),
    (dict(target=LABELS[:, None]), ValueError, "target: got shape (4, 1)"),
    (dict(target=LOGITS.long()), TypeError, "target: got torch.int64 of shape (4, 5)"),
    (dict(target=LOGITS.softmax(1), ignore_index=2), ValueError, "ignore_index: got 2"),
    (dict(target=[0, 1, 2, 3]), TypeError, "target: got list"),
    (dict(input=LOGITS.long()), TypeError, "input: got torch.int64"),
])
@pytest.mark.parametrize("name", ["tce", "mse", "mae", "gce", "rce", "forward"])
def test_bad_input_is_named(name, arguments, kind, message):
    fine = {"input": LOGITS, "target": LABELS}
    options = {name: value for name, value in arguments.items() if name not in fine}
    with pytest.raises(kind) as error: build(name, **options)(**{name: arguments.get(name, fine[name]) for name in fine})
    assert str(error.value).startswith(message)
    if name in FUNCTIONS:
        with pytest.raises(kind): FUNCTIONS[name](**{**fine, **arguments})


@each_loss
def test_a_label_out_of_range_is_torchs_to_tell(name):
    for target in (LABELS + 2, LABELS - 1):
        with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"): build(name)(LOGITS, target)


@pytest.mark.parametrize("name, setting, bad, allowed", [
    ("tce", "alpha", [-0.1, math.nan, math.inf, True, "1.5", None], "a finite number >= 0"),
    ("gce", "exponent", [-0.1, 1.1, math.nan, True, "a", None], "a number from 0 to 1"),
    ("truncated_gce", "exponent", [2], "a number from 0 to 1"),
    ("truncated_gce", "threshold", [-1, 1.5], "a number from 0 to 1"),
    ("phuber", "tau", [0.5, math.inf, -1], "a finite number >= 1"),
    ("taylor", "order", [0, -1, 1.5, "2"], "an int >= 1"),
    ("focal", "gamma", [-1, math.inf], "a finite number >= 0"),
    ("nfl", "gamma", [-1], "a finite number >= 0"),
    ("rce", "log_zero", [0, 1, -math.inf], "a number above -80 and below 0"),
    ("sce", "alpha", [-1, math.nan], "a finite number >= 0"),
    ("sce", "beta", [-1], "a finite number >= 0"),
    ("nce_rce", "beta", [-1], "a finite number >= 0"),
    ("nce_mae", "alpha", [-1], "a finite number >= 0"),
    ("js", "pi", [0, 1, -0.5, 2], "a number above 0 and below 1"),
    ("bitempered", "t1", [-0.1, 1.1], "a number from 0 to 1"),
    ("bitempered", "t2", [0.9, 5.5, math.inf], "a number from 1 to 5"),
    ("bootstrap_soft", "beta", [-0.1, 1.1], "a number from 0 to 1"),
    ("bootstrap_hard", "beta", [-0.1, 1.1], "a number from 0 to 1"),
])
def test_bad_settings_are_named(name, setting, bad, allowed):
    for value in bad:
        with pytest.raises((TypeError, ValueError)) as error: build(name, **{setting: value})
        assert str(error.value) == f"{setting}: got {value!r}, expected {allowed}"


def test_any_real_number_is_a_setting_and_class_weights_are_none():
    for value in (np.float32(0.5), np.int64(1), 1): assert build("gce", exponent=value).exponent == float(value)
    with pytest.raises(TypeError, match=r"^exponent: got torch.float32 of shape \(10,\), expected a number"):
        build("gce", exponent=torch.ones(10))


@pytest.mark.parametrize("transition, message", [
    (None, "got NoneType"), (torch.ones(2, 3) / 3, r"got shape \(2, 3\)"),  # more of them in test_noise
])
def test_bad_transitions_are_named(transition, message):
    with pytest.raises((TypeError, ValueError), match=f"^transition: {message}"): ForwardCorrectedLoss(transition)


def test_forward_correction_is_exact_far_below_the_range_of_exp():
    logits = torch.tensor([[0.0, -300.0, -400.0]], requires_grad=True)
    matrix = torch.tensor([[1.0, 0, 0], [0, 0.6, 0.4], [0, 0.4, 0.6]])
    value, gradient = value_and_gradient(ForwardCorrectedLoss(matrix)(logits, torch.tensor([2])), logits)
    assert_close(value, torch.tensor(300 - math.log(0.4)))
    assert_close(gradient, torch.tensor([[1.0, -1.0, 0.0]]))


@pytest.mark.parametrize("t", [1 + 1e-6, 1.05, 1.2, 2.0, 4.0])
def test_tempered_softmax_sums_to_one(t):
    for dtype, classes, scale in product((torch.float32, torch.float64), (2, 10, 1000), (0, 0.1, 1, 30, 1e4)):
        x = scale * torch.randn(50, classes, dtype=dtype, generator=torch.Generator().manual_seed(classes))
        total = tempered_log_softmax(x, 1, t).exp().sum(1)
        assert_close(total, torch.ones_like(total), rtol=0, atol=10 * torch.finfo(dtype).eps * classes ** 0.5)
    near = tempered_log_softmax(torch.arange(5.0), 0, 1 + 1e-9)
    assert_close(near, torch.arange(5.0).log_softmax(0))


@pytest.mark.parametrize("gap", [90.0, 2000.0])
def test_second_derivatives_of_jensen_shannon_are_numbers_for_a_hopeless_label(gap):
    logits = torch.tensor([[gap, 0.0, 0.0]], requires_grad=True)
    slope, = torch.autograd.grad(get_loss("js")(logits, torch.tensor([1])), logits, create_graph=True)
    bend, = torch.autograd.grad(slope.square().sum(), logits)
    assert slope.isfinite().all() and bend.isfinite().all()


@each_loss
def test_forward_and_backward_mode_agree_on_one_sample(name):
    loss, x, t = build(name), torch.randn(5), torch.tensor(1)
    assert_close(torch.func.jacfwd(loss)(x, t), torch.func.jacrev(loss)(x, t))  # of one dtype
