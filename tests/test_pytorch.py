"""PyTorch's own tests of cross entropy, on ours: at `alpha=0` against that function, above it the closed form."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradgradcheck
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from tce_nb import TamedCrossEntropyLoss, tamed_cross_entropy

# importing PyTorch's tests forbids all others to set flags such as cudnn.deterministic
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

OP, = (op for op in op_db if op.name == "nn.functional.cross_entropy")
MODULE, = (info for info in module_db if info.module_cls is torch.nn.CrossEntropyLoss)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ALPHAS = [0.5, 1.0, 1.5, 2.0, 3.0]


def samples(dtype=torch.float64):
    "Input, target and options of each sample input: the function's, then the module's, which smooth labels as well"
    torch.manual_seed(0)
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=True):
        yield sample.input, sample.args[0], sample.kwargs
    for sample in MODULE.module_inputs_func(MODULE, "cpu", dtype, requires_grad=True, training=True):
        yield *sample.forward_input.args, sample.constructor_input.kwargs


def closed_form(input, target, alpha, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    "sum_i p_i w_i ((1 + l_i)^(1 - alpha) - 1) / (1 - alpha), with the mean that `F.cross_entropy` takes"
    if input.dim() == 1:
        return closed_form(input[None], target[None], alpha, weight, ignore_index, reduction,
                           label_smoothing).reshape(())
    classes = input.shape[1]
    w = torch.ones(classes, dtype=input.dtype) if weight is None else weight
    ell = -F.log_softmax(input, 1)
    terms = torch.log(1 + ell) if alpha == 1 else ((1 + ell)**(1 - alpha) - 1) / (1 - alpha)
    if target.shape == input.shape:
        p, counts = target, torch.ones_like(target[:, 0])
        kept = counts
    else:
        kept = (target != ignore_index).to(input.dtype)
        index = torch.where(target == ignore_index, 0, target)
        p, counts = F.one_hot(index, classes).movedim(-1, 1), w[index] * kept
    p = (1 - label_smoothing) * p + label_smoothing / classes
    loss = (p * terms * w.view(-1, *[1] * (input.dim() - 2))).sum(1) * kept
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counts.sum()}[reduction]


def value_and_gradients(loss, input, target, *args, **options):
    "The loss, and what flows back to the logits and to a target that wants it"
    value = loss(input, target, *args, **options)
    wanted = [x for x in (input, target) if x.requires_grad]
    pull = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value, *torch.autograd.grad(value, wanted, pull)


def tangent(loss, input, target, *args, **options):
    "The directional derivative by forward mode, along a fixed direction"
    with forward_ad.dual_level():
        along = torch.linspace(-1, 1, input.numel(), dtype=input.dtype).view(input.shape)
        dual = forward_ad.make_dual(input.detach(), along)
        return forward_ad.unpack_dual(loss(dual, target.detach(), *args, **options)).tangent


def test_the_samples_are_those_that_matter():
    found = list(samples())
    assert len(found) == 21 + 3 * (5*4 + 3*5)
    options = {name for _, _, kwargs in found for name in kwargs}
    assert options == {"weight", "reduction", "ignore_index", "label_smoothing"}
    assert {input.dim() for input, _, _ in found} == {1, 2, 3, 4, 5, 6}
    assert any(input.shape == target.shape for input, target, _ in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alpha_0_is_the_function_of_pytorch_to_the_bit(dtype):
    for input, target, options in samples(dtype):
        ours = value_and_gradients(tamed_cross_entropy, input, target, 0, **options)
        theirs = value_and_gradients(F.cross_entropy, input, target, **options)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert_close(tangent(tamed_cross_entropy, input, target, 0, **options),
                     tangent(F.cross_entropy, input, target, **options), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("alpha", [0, *ALPHAS])
def test_it_is_the_closed_form(alpha):
    for input, target, options in samples():
        ours = value_and_gradients(tamed_cross_entropy, input, target, alpha, **options)
        right = value_and_gradients(closed_form, input, target, alpha, **options)
        for a, b in zip(ours, right, strict=True): assert_close(a, b, equal_nan=True)
        assert_close(tangent(tamed_cross_entropy, input, target, alpha, **options),
                     tangent(closed_form, input, target, alpha, **options))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_the_dtype_is_that_of_pytorch(alpha, dtype):
    for input, target, options in samples(dtype):
        ours = tamed_cross_entropy(input, target, alpha, **options)
        assert ours.dtype == F.cross_entropy(input, target, **options).dtype == dtype
        exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        soft = target.double() if target.is_floating_point() else target
        right = closed_form(input.double(), soft, alpha, **exact)
        scale = 1 + right.nan_to_num().abs().max().item()  # nan: every label is ignored
        assert_close(ours.double(), right, rtol=0, atol=16 * torch.finfo(dtype).eps * scale, equal_nan=True)


@pytest.mark.parametrize("alpha", [0, 0.5, 1.0, 3.0])
def test_second_derivatives_hold_numerically(alpha):
    for input, target, options in samples():
        if input.dim() > 2: continue
        loss = partial(tamed_cross_entropy, target=target.detach(), alpha=alpha, **options)
        assert gradgradcheck(loss, (input,), check_fwd_over_rev=True, fast_mode=True)


# Ours differ on purpose: the error names the argument, and its type says whether the value or the type is wrong.
OURS = [(TypeError, "target: .*int64.*expected floating-point probabilities"),
        (TypeError, "target: .*expected int64 class indices"),
        (ValueError, r"target: got shape \(3,\), expected \(2,\)"),
        (ValueError, "weight: got 2 weights, expected one for each of the input's 3 classes"),
        (ValueError, "ignore_index: got 1, expected a negative number with a target of probabilities"),
        (ValueError, "label_smoothing: got 1.5, expected a number from 0 to 1"),
        (ValueError, r"target: got shape \(2, 4\), expected \(2, 5\)")]
ERRORS = MODULE.module_error_inputs_func(MODULE, "cpu", torch.float32, requires_grad=False, training=True)


@pytest.mark.parametrize("alpha", [0, 1.5])
@pytest.mark.parametrize("error, ours", list(zip(ERRORS, OURS, strict=True)),
                         ids=[error.error_regex for error in ERRORS])
def test_what_pytorch_refuses_we_refuse(error, ours, alpha):
    build, call = error.module_error_input.constructor_input, error.module_error_input.forward_input
    for loss, kind, said in [(torch.nn.CrossEntropyLoss, error.error_type, error.error_regex),
                             (TamedCrossEntropyLoss, *ours)]:
        first = {"alpha": alpha} if loss is TamedCrossEntropyLoss else {}
        with pytest.raises(kind, match=said): loss(*build.args, **first, **build.kwargs)(*call.args)
