"""Bad input of rms_norm_backward raises before anything is allocated, naming the argument and both
values."""

import pytest
import support
import torch
from test_errors import DENSE, LENGTH, MODES, X_DTYPE

INPUTS = support.make_inputs(4, 8, dtype=torch.float32, weight_dtype=torch.float32)
X, WEIGHT, GRAD_Y = INPUTS
RSTD = support.run_op(INPUTS).rstd
GOOD = {
    "grad_y": GRAD_Y,
    "x": X,
    "weight": WEIGHT,
    "rstd": RSTD,
    "zero_centered_gamma": False,
    "output_mask": [True, True],
}
GRAD_SHAPE = "grad_y must have shape [4, 8], got"
GRAD_DTYPE = "grad_y must have the dtype of x, Float, got Half"
GRAD_DEVICE = "grad_y must be on the device of x, cpu, got meta"
RSTD_SHAPE = "rstd must have shape [4], got"
RSTD_DTYPE = "rstd must have dtype Float for x of dtype Float, got Double"
RSTD_DEVICE = "rstd must be on the device of x, cpu, got meta"
PAIR = "weight of dtype Double does not go with x of dtype Float"
MASK = "output_mask asks for the gradient of weight, but weight is None"
BAD = {
    "grad_y_short": (RuntimeError, f"{GRAD_SHAPE} [3, 8]", {"grad_y": GRAD_Y[:3]}),
    "grad_y_transposed": (RuntimeError, f"{GRAD_SHAPE} [8, 4]", {"grad_y": GRAD_Y.T}),
    "grad_y_flat": (RuntimeError, f"{GRAD_SHAPE} [32]", {"grad_y": GRAD_Y.flatten()}),
    "grad_y_broadcast": (RuntimeError, f"{GRAD_SHAPE} [1, 8]", {"grad_y": GRAD_Y[:1]}),
    "grad_y_dtype-sglang-32807": (TypeError, GRAD_DTYPE, {"grad_y": GRAD_Y.half()}),
    "grad_y_device": (RuntimeError, GRAD_DEVICE, {"grad_y": GRAD_Y.to("meta")}),
    "grad_y_sparse": (RuntimeError, f"grad_y {DENSE} Sparse", {"grad_y": GRAD_Y.to_sparse()}),
    "grad_y_mkldnn": (RuntimeError, f"grad_y {DENSE} Mkldnn", {"grad_y": GRAD_Y.to_mkldnn()}),
    "rstd_keepdim": (RuntimeError, f"{RSTD_SHAPE} [4, 1]", {"rstd": RSTD[:, None]}),
    "rstd_short": (RuntimeError, f"{RSTD_SHAPE} [3]", {"rstd": RSTD[:3]}),
    "rstd_dtype": (TypeError, RSTD_DTYPE, {"rstd": RSTD.double()}),
    "rstd_device": (RuntimeError, RSTD_DEVICE, {"rstd": RSTD.to("meta")}),
    "rstd_sparse": (RuntimeError, f"rstd {DENSE} Sparse", {"rstd": RSTD.to_sparse()}),
    "rstd_mkldnn": (RuntimeError, f"rstd {DENSE} Mkldnn", {"rstd": RSTD.to_mkldnn()}),
    "x_dtype": (TypeError, f"{X_DTYPE} Long", {"x": X.long()}),
    "x_0d": (RuntimeError, "x must have at least 1 dimension", {"x": X[0, 0]}),
    "x_sparse": (RuntimeError, f"x {DENSE} Sparse", {"x": X.to_sparse()}),
    "weight_short": (RuntimeError, f"{LENGTH} 7", {"weight": WEIGHT[:7]}),
    "weight_dtype": (TypeError, PAIR, {"weight": WEIGHT.double()}),
    "mask_without_weight": (RuntimeError, MASK, {"weight": None}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_raises(bad, mode):
    error, message, changed = BAD[bad]
    arguments = {**GOOD, **changed}
    with MODES[mode]():
        support.assert_raises(
            error,
            f"rms_norm_backward: {message}",
            lambda: torch.ops.automodel.rms_norm_backward(**arguments),
        )


def test_good_arguments_do_not_raise():
    torch.ops.automodel.rms_norm_backward(**GOOD)
