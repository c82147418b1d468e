"""What the gate's properties are made of: outcomes, cases, and variants of their rows."""

import automodel_rms_norm as arn
import pytest
import torch
from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import leaves, norm_inputs
from automodel_rms_norm.gate import capture, rows, runner
from automodel_rms_norm.gate.norms import MODELS, OP
from automodel_rms_norm.gate.recipe import Selection
from automodel_rms_norm.gate.runner import FAILS, HOLDS, NOT_RUN, Check, Measured, NotRunError


def test_outcomes_of_checks():
    def raises(error: Exception):
        def run():
            raise error

        return run

    checks = [
        Check("A", "one", "here", lambda: Measured({}, lambda: None)),
        Check("A", "two", "here", lambda: Measured({}, lambda: Difference("y", "1 of 2 differ"))),
        Check("A", "judged", "here", lambda: Measured({}, raises(NotRunError("unknown")))),
        Check("A", "three", "here", raises(NotRunError("too dark"))),
        Check("A", "four", "here", raises(ValueError("wrong\nvery"))),
    ]
    assert [(o.case, o.status, o.detail) for o in runner.run(checks)] == [
        ("one", HOLDS, ""),
        ("two", FAILS, "y: 1 of 2 differ"),
        ("judged", NOT_RUN, "unknown"),
        ("three", NOT_RUN, "too dark"),
        ("four", FAILS, "raised ValueError: wrong"),
    ]


def test_model_cases_have_every_width_and_gains_away_from_1():
    widths = {width for width, _, _ in MODELS}
    assert widths == {128, 1024, 2048, 2688, 3072, 4096, 5120, 8192, 16384}
    seen = set()
    cases = list(OP.cases())
    for case in cases:
        x, weight, _, zero_centered_gamma = case.inputs.arguments.values()
        grad_y = case.inputs.grads["y"]
        assert x.shape == grad_y.shape
        assert x.dtype == grad_y.dtype
        seen.add(x.shape[-1])
        if weight is not None:
            assert weight.unique().numel() > 16
            centre = 0.0 if zero_centered_gamma else 1.0
            assert abs(weight.double().mean().item() - centre) < 0.2
    assert seen == widths
    assert len({case.label for case in cases}) == len(cases)


def test_captured_cases_are_every_norm_of_the_model():
    pytest.importorskip("transformers")
    state = torch.random.get_rng_state()
    cases = capture.captured_cases(zero_centered_gamma=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    names = [case.label.split(",")[0] for case in cases]
    layers = ["input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"]
    expected = [f"Qwen3 layers.{layer}.{name}" for layer in (0, 1) for name in layers]
    assert names == [*expected, "Qwen3 norm"]
    for case in cases:
        x, weight, eps, zero_centered_gamma = case.inputs.arguments.values()
        grad_y = case.inputs.grads["y"]
        assert zero_centered_gamma is False
        assert x.dtype == weight.dtype == grad_y.dtype == torch.bfloat16
        assert x.shape == grad_y.shape
        assert x.shape[-1] == (128 if "self_attn" in case.label else 256)
        assert eps == 1e-6
        assert weight.std() > 0.1
        assert grad_y.count_nonzero() > 0
    again = capture.captured_cases(zero_centered_gamma=True)
    for one, other in zip(cases, again, strict=True):
        arn.testing.assert_bitwise_equal(one.inputs.grads["y"], other.inputs.grads["y"])
        for name, tensor in one.inputs.tensors.items():
            arn.testing.assert_bitwise_equal(tensor, other.inputs.tensors[name])


def test_row_variants_hold_the_rows_that_they_say():
    x = torch.arange(35.0).reshape(7, 5)
    inputs = norm_inputs(x, None, x * 100, 1e-5)
    for name, vary in rows.ROW_VARIANTS.items():
        for changed, here, there in vary(inputs):
            assert len(here) > 0, name
            assert torch.equal(changed.arguments["x"][here], x[there]), name
            assert torch.equal(changed.grads["y"][here], inputs.grads["y"][there]), name
    (strided,) = rows.LAYOUTS["every second element"](inputs)
    assert strided.inputs.arguments["x"].stride() == (10, 2)
    (shifted,) = rows.LAYOUTS["one element off alignment"](inputs)
    assert shifted.inputs.arguments["x"].storage_offset() == 1
    (raised,) = rows.other_rank(inputs)
    assert raised.inputs.arguments["x"].shape == (1, 7, 1, 5)
    appended = rows.with_zero_grad_rows(inputs, 9)
    assert appended.arguments["x"].shape == (16, 5)
    assert appended.grads["y"][7:].count_nonzero() == 0


def test_leaves_keep_strides_and_alignment_in_other_memory():
    x = torch.arange(35.0).reshape(7, 5)
    for vary in rows.LAYOUTS.values():
        ((inputs, _, _),) = vary(norm_inputs(x, None, x, 1e-5))
        given, leaf = inputs.arguments["x"], leaves(inputs).arguments["x"]
        assert leaf.stride() == given.stride()
        assert leaf.storage_offset() == given.storage_offset()
        assert leaf.data_ptr() != given.data_ptr()
        assert torch.equal(leaf, x)


def test_thread_counts_are_undone():
    inputs = norm_inputs(torch.ones(2, 2), None, torch.ones(2, 2), 1e-5)
    before = torch.get_num_threads()
    seen = [torch.get_num_threads() for _ in rows.thread_counts(inputs)]
    assert seen == [1, 2, 3]
    assert torch.get_num_threads() == before


def test_a_case_moves_to_a_device(device):
    (case, *_) = OP.cases(Selection(quick=True))
    moved = case.to(device)
    assert moved.inputs.device.type == device.type
    assert moved.inputs.grads["y"].device.type == device.type
    assert moved.label == case.label
