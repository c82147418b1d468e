"""P7: the recorded digests are what the op gives, on every device and instruction set."""

import pytest
import support
import torch
from automodel_rms_norm import golden, reference

MASK = (1 << 64) - 1
CASES = golden.cases()


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def value_of(case: golden.GoldenCase, stream: int, dtype: torch.dtype, index: int) -> float:
    """golden_value of csrc/numerics/golden_inputs.h in Python's integers and floats."""
    hashed = mix((mix(4 * case.number + stream) + index) & MASK)
    second = mix(hashed)
    value = (sum((hashed >> places) & 0xFFFF for places in (0, 16, 32, 48)) - 131070) * 2.0**-15
    if dtype in (torch.float32, torch.float64):
        value *= ((second >> 12) | (1 << 52)) * 2.0**-52
    if stream == 1:
        return value * 0.25 if case.zero_centered_gamma else 1.0 + value * 0.25
    if stream == 4:
        return value
    if case.kind == "zero_rows" and index // case.hidden % 3 == (2 if stream == 2 else 1):
        return 0.0
    if stream == 2:
        return value
    if case.kind == "spiky" and second % 64 == 0:
        value *= 1024.0
    exponents = {
        "tiny": {torch.float16: -18, torch.float64: -530},
        "huge": {torch.float16: 12, torch.float64: 490},
    }
    others = {"tiny": -70, "huge": 50}
    return value * 2.0 ** exponents.get(case.kind, {}).get(dtype, others.get(case.kind, 0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_are_those_of_the_specification(case):
    x, weight, grad_y, residual, grad_sum = golden.inputs(case)
    assert x.shape == grad_y.shape == (case.rows, case.hidden)
    assert x.dtype == grad_y.dtype == case.x_dtype
    streams = [(0, x), (2, grad_y)]
    if case.weight_dtype is None:
        assert weight is None
    else:
        assert (weight.shape, weight.dtype) == ((case.hidden,), case.weight_dtype)
        streams.append((1, weight))
    if not case.residual:
        assert residual is grad_sum is None
    else:
        assert residual.shape == grad_sum.shape == x.shape
        assert residual.dtype == grad_sum.dtype == x.dtype
        streams += [(3, residual), (4, grad_sum)]
    for stream, tensor in streams:
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() // 97)
        for index in {*range(0, flat.numel(), step), flat.numel() - 1}:
            exact = torch.tensor(value_of(case, stream, flat.dtype, index), dtype=torch.float64)
            assert flat[index].item() == exact.to(flat.dtype).item(), (stream, index)


def test_cases_reach_what_they_are_for():
    kinds = {case.kind for case in CASES}
    assert kinds == {"plain", "tiny", "huge", "spiky", "zero_rows"}
    assert len({(case.x_dtype, case.weight_dtype) for case in CASES}) == 17
    assert {case.kind for case in CASES if case.residual} == kinds
    assert {case.x_dtype for case in CASES if case.residual} == {*support.X_DTYPES}
    assert len({str(case) for case in CASES}) == len(CASES)
    for case in CASES:
        x, _, grad_y, residual, _ = golden.inputs(case)
        if case.residual:
            x = x + residual
        assert bool(x.isfinite().all())
        if case.kind == "zero_rows":
            assert x[1].count_nonzero() == grad_y[2].count_nonzero() == 0
            assert x[2].count_nonzero() > 0


def test_digest_is_the_specified_sum():
    tensor = torch.tensor([[1.0, -2.0], [0.5, 1e-8]], dtype=torch.bfloat16)
    patterns = [0x3F80, 0xC000, 0x3F00, 0x322C]
    expected = sum(mix(bits ^ mix(index)) for index, bits in enumerate(patterns)) & MASK
    assert golden.digest(tensor) == expected
    assert golden.digest(tensor.t().contiguous().t()) == expected
    assert golden.digest(tensor.t()) != expected
    assert golden.digest(None) == golden.digest(tensor[:0]) == 0
    # Above 2^63 as below it, and over more than one block.
    assert golden.digest(torch.tensor([-1])) == mix(MASK ^ mix(0))
    ones = torch.ones(20_000, dtype=torch.int8)
    assert golden.digest(ones) == sum(mix(1 ^ mix(index)) for index in range(20_000)) & MASK


def test_one_bit_changes_a_digest(device):
    tensor = torch.randn(200, 300, device=device, generator=torch.Generator(device).manual_seed(0))
    before = golden.digest(tensor)
    tensor[150, 7] = torch.nextafter(tensor[150, 7], tensor.new_tensor(torch.inf))
    assert golden.digest(tensor) != before


def outputs_of(case: golden.GoldenCase) -> list[str]:
    return ["y", "rstd", "grad_x", "grad_weight", *(["sum"] if case.residual else [])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_gives_the_recorded_digests(case, implementation):
    results = list(golden.verify(device=implementation, only=[case]))
    assert [result.output for result in results] == outputs_of(case)
    assert not [result for result in results if not result.holds]


def run_reference(case: golden.GoldenCase, given: golden.GoldenInputs) -> golden.Outputs:
    x, weight, grad_y, residual, grad_sum = given
    centred = case.zero_centered_gamma
    added = {}
    if residual is None:
        y, rstd = reference.rms_norm_forward(x, weight, case.eps, centred)
    else:
        y, x, rstd = reference.add_rms_norm_forward(x, residual, weight, case.eps, centred)
        added = {"sum": x}
    grads = reference.rms_norm_backward(grad_y, x, weight, rstd, centred, grad_sum)
    return {"y": y, "rstd": rstd, "grad_x": grads[0], "grad_weight": grads[1], **added}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_gives_the_recorded_digests(case):
    results = list(golden.verify(run_reference, only=[case]))
    assert [result.output for result in results] == outputs_of(case)
    assert not [result for result in results if not result.holds]


def test_verify_tells_a_wrong_output():
    def wrong(case, given):
        outputs = golden.run_op(case, given)
        return {**outputs, "grad_x": outputs["grad_x"] * 2}

    results = list(golden.verify(wrong, only=CASES[:3]))
    assert {result.output for result in results if not result.holds} == {"grad_x"}
    assert len(results) == 12
