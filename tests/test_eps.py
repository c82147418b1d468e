"""eps is required, is rounded to the accumulate type once, and acts as the formula says."""

import automodel_rms_norm as arn
import pytest
import support
import torch

INEXACT = [1e-5, 0.1 + 0.2]


def scaled(scale: float, dtype: torch.dtype, device: torch.device) -> support.Inputs:
    inputs = support.make_inputs(3, 40, dtype=dtype, device=device)
    return inputs._replace(x=(inputs.x.double() * scale).to(dtype))


def assert_reference(inputs: support.Inputs, eps: float) -> support.Results:
    actual = support.run_op(inputs, eps)
    support.assert_same(actual, support.run_reference(inputs, eps))
    return actual


@pytest.mark.case("DeepSpeed-581")
@pytest.mark.parametrize("eps", [1e-12, 1e-8])
@pytest.mark.parametrize("dtype", support.X_DTYPES, ids=str)
def test_zero_rows_give_zeros(dtype, eps, implementation):
    inputs = scaled(1.0, dtype, implementation)
    inputs.x[[0, 2]] = 0
    y = assert_reference(inputs, eps).y
    assert (y[[0, 2]] == 0).all()
    assert (y[1] != 0).all()


@pytest.mark.case("DeepSpeed-581")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_eps_acts_on_tiny_rows_as_the_formula_says(dtype, implementation):
    inputs = scaled(1e-3, dtype, implementation)
    y, z = (assert_reference(inputs, eps).y.double() for eps in (1e-6, 1.2e-6))
    square = inputs.x.double().square().mean(-1, keepdim=True)
    ratio = ((square + 1.2e-6) / (square + 1e-6)).sqrt()
    # y and z are each off by half a unit of dtype, float32's own error is a 256th of that.
    rtol = 1.01 * torch.finfo(dtype).eps
    torch.testing.assert_close(y / z, ratio.expand_as(y), rtol=rtol, atol=0)
    assert (y != z).double().mean() > 0.9


@pytest.mark.parametrize("eps", [0.0, 1e-50, 1e-45, 1e-40, 1e-12, 1e-6, 1.0, 1e30, *INEXACT])
@pytest.mark.parametrize("scale", [1e-20, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_eps_is_rounded_to_the_accumulate_type(dtype, scale, eps, implementation):
    inputs = scaled(scale, dtype, implementation)
    results = assert_reference(inputs, eps)
    rounded = torch.tensor(eps, dtype=results.rstd.dtype).item()
    support.assert_same(support.run_op(inputs, rounded), results)


def test_zero_rows_without_eps_are_the_formulas_nan(implementation):
    inputs = scaled(0.0, torch.float32, implementation)
    results = assert_reference(inputs, 0.0)
    assert torch.isinf(results.rstd).all()
    assert torch.isnan(results.y).all()


@pytest.mark.case("pytorch-189581")
def test_eps_is_required_and_the_same_for_every_dtype(implementation):
    x = (support.make_inputs(2, 4, 1, 32).x * 0.058).to(implementation)
    for eps in ((), (None,)):
        with pytest.raises((RuntimeError, TypeError), match="eps"):
            arn.rms_norm(x, None, *eps)
    rstds = [
        torch.ops.automodel.rms_norm_forward(x.to(dtype), None, 1e-6, False)[1]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    arn.testing.assert_bitwise_equal(*rstds, "rstd")


@pytest.mark.case("vLLM-PR-57123", "Liger-PR-1350")
@pytest.mark.parametrize("eps", INEXACT)
def test_eager_compiled_and_graph_agree_over_1e8_elements(eps, device, fresh_dynamo):
    rows, hidden = 24415, 4096
    assert rows * hidden >= 1e8
    x, weight, _ = support.make_inputs(64, hidden, device=device)
    scales = torch.logspace(-4, 4, rows, device=device)
    x = (x.repeat(rows // 64 + 1, 1)[:rows] * scales[:, None]).bfloat16()

    def bits(y: torch.Tensor) -> torch.Tensor:
        return y.view(torch.int16)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return arn.rms_norm(x, weight, eps)

    eager = norm(x, weight)
    compiled = torch.compile(norm, fullgraph=True)(x, weight)
    assert torch.equal(bits(compiled), bits(eager))
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = norm(x, weight)
        graph.replay()
        assert torch.equal(bits(captured), bits(eager))
