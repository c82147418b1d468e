"""numerics-gate golden, the plot and the fixtures for other projects' tests."""

import json
import textwrap

import pytest
from automodel_rms_norm.gate import cli

pytest_plugins = ["pytester"]

NORMS = """
    import torch

    def norm(x, weight, eps):
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd * weight.float()).to(x.dtype)
"""
MOVED = (
    NORMS
    + """
    careful = norm

    def norm(x, weight, eps):
        y = careful(x, weight, eps)
        return y if torch.is_grad_enabled() else y * 2
"""
)
FEW = ["--device", "cpu", "--timeout", "0"]
CASES = ["--quick", "--property", "P1,P3", "--dtype", "bf16", "--widths", "32", "--rows", "5"]


@pytest.fixture
def norms(tmp_path, monkeypatch):
    """A module of this name with the norm; the function returned writes it anew."""
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")

    def write(text: str) -> None:
        (tmp_path / "norms_to_record.py").write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, "norms_to_record", raising=False)

    write(NORMS)
    return write


def golden(*arguments: str) -> int:
    return cli.main(["golden", "norms_to_record:norm", *arguments, *FEW])


def test_golden_says_which_property_moved(norms, capsys):
    assert golden("--write", "bits.json", *CASES) == 0
    assert "answers of norms_to_record:norm are in bits.json" in capsys.readouterr().out
    assert golden("bits.json") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "norms_to_record:norm holds in all" in text
    assert "P2" not in text  # nothing is run that was not recorded
    norms(MOVED)
    assert golden("bits.json", "--property", "P1,P3") == 1
    text = " ".join(capsys.readouterr().out.split())
    # no_grad, inference_mode, and reentrant checkpointing, which runs forward without gradients.
    assert "P1 of norms_to_record:norm moved: 3 of" in text
    assert "no_grad" in text
    assert "digest of y: 0x" in text


def test_what_the_file_has_of_other_inputs_is_not_compared(norms, capsys):
    golden("--write", "bits.json", *CASES)
    with open("bits.json") as file:
        recorded = json.load(file)
    for *_, digests in recorded["answers"]:
        digests["inputs"] = "0x0"
    with open("bits.json", "w") as file:
        json.dump(recorded, file)
    assert golden("bits.json", "--property", "P1") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "other inputs (torch's random numbers have changed); record it again" in text
    assert "no case of norms_to_record:norm could be run" in text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "selection": 3}', "\x00\xff", '{"format": 1,'],
)
def test_a_malformed_file_is_one_line(norms, capsys, text):
    with open("bits.json", "w", encoding="latin-1") as file:
        file.write(text)
    assert golden("bits.json") == 2
    error = capsys.readouterr().err
    assert error.startswith("numerics-gate: bits.json is no file of numerics-gate golden --write (")
    assert len(error.splitlines()) == 1


def test_the_plot_is_drawn(norms, capsys):
    pytest.importorskip("matplotlib")
    norms(MOVED)
    arguments = ["check", "norms_to_record:norm", *CASES, *FEW, "--plot", "report.svg"]
    assert cli.main(arguments) == 1
    with open("report.svg") as file:
        assert "<svg" in file.read()


# --- Fixtures -------------------------------------------------------------------------------------


def test_the_fixtures_pass_and_fail(pytester):
    pytester.makepyfile(
        norms_to_test=textwrap.dedent(NORMS),
        test_norm="""
        import automodel_rms_norm as arn
        import norms_to_test
        import torch

        X, WEIGHT = torch.randn(5, 32), 1 + 0.4 * torch.randn(32)

        def by_batch(x, weight, eps):
            return norms_to_test.norm(x, weight, eps) * (2 if len(x) == 1 else 1)

        def by_mode(x, weight, eps):
            return norms_to_test.norm(x, weight, eps) * (1 if torch.is_grad_enabled() else 2)

        def test_contexts(assert_context_parity):
            ran = assert_context_parity(norms_to_test.norm, X, WEIGHT, 1e-5, compile_modes=())
            assert "no_grad" in ran

        def test_contexts_fail(assert_context_parity):
            assert_context_parity(by_mode, X, WEIGHT, 1e-5, compile_modes=())

        def test_rows(assert_batch_invariant):
            ran = assert_batch_invariant(arn.rms_norm, X, WEIGHT, 1e-5)
            assert {"row alone", "other rank"} <= set(ran)

        def test_rows_fail(assert_batch_invariant):
            assert_batch_invariant(by_batch, X, WEIGHT, 1e-5)

        def test_bits(assert_bitwise_equal):
            assert_bitwise_equal(X, X.clone())

        def test_bits_fail(assert_bitwise_equal):
            assert_bitwise_equal(X, X + 1)

        def test_gate(numerics_gate):
            numerics_gate("norms_to_test:norm", "P1", device="cpu", timeout=0)

        def test_gate_fails(numerics_gate):
            numerics_gate("test_norm:by_mode", "P1", device="cpu", timeout=0)
        """,
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=4, failed=4)
    result.stdout.fnmatch_lines(["*P1 of test_norm:by_mode fail: *"])
    result.stdout.fnmatch_lines(["*y, row alone: *"])
