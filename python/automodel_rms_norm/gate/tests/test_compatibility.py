"""``pytest --pyargs automodel_rms_norm.gate``: does the op keep its contract on this stack?"""

from __future__ import annotations

import pytest
import torch

import automodel_rms_norm as arn
from automodel_rms_norm.gate.check import check, why_no_gpu
from automodel_rms_norm.gate.norms import OP
from automodel_rms_norm.gate.properties import PROPERTIES
from automodel_rms_norm.gate.recipe import Selection


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("key", [property.key for property in PROPERTIES])
def test_the_op_keeps(key: str, device: str) -> None:
    if device == "cuda" and (reason := why_no_gpu()):
        pytest.skip(reason)
    asked = [property for property in PROPERTIES if property.key == key]
    report = check(OP, asked, device, Selection(quick=True))
    if report.failed:
        pytest.fail(report.as_text(), pytrace=False)
    if not report.holds:
        pytest.skip(report.verdict())


def test_the_module_is_the_op() -> None:
    x, weight = torch.randn(3, 5, 130), 1 + 0.4 * torch.randn(130)
    module = arn.RMSNorm(130, eps=1e-6, dtype=torch.float32)
    module.load_state_dict({"weight": weight})
    with torch.no_grad():
        arn.testing.assert_bitwise_equal(module(x), arn.rms_norm(x, weight, 1e-6), "y")
