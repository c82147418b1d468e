"""The pytest plugin of automodel-rms-norm: assertions on bits, and the gate, as fixtures.

A package of its own, so that pytest imports torch in the tests alone that ask for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from automodel_rms_norm.gate.report import Report

__all__ = [
    "assert_batch_invariant",
    "assert_bitwise_equal",
    "assert_context_parity",
    "numerics_gate",
]


@pytest.fixture
def assert_bitwise_equal() -> Callable[..., None]:
    """``automodel_rms_norm.testing.assert_bitwise_equal``."""
    from automodel_rms_norm import testing

    return testing.assert_bitwise_equal


@pytest.fixture
def assert_context_parity() -> Callable[..., list[str]]:
    """``automodel_rms_norm.testing.assert_context_parity``."""
    from automodel_rms_norm import testing

    return testing.assert_context_parity


@pytest.fixture
def assert_batch_invariant() -> Callable[..., list[str]]:
    """``automodel_rms_norm.testing.assert_batch_invariant``."""
    from automodel_rms_norm import testing

    return testing.assert_batch_invariant


@pytest.fixture
def numerics_gate() -> Callable[..., Report]:
    """``numerics-gate check``: ``numerics_gate(target, "P1,P3", device="auto", quick=True)``.

    `target` is a Recipe or what the command takes; the test fails with the table where one of the
    named properties does not hold, and is skipped where none could be run.
    """
    from automodel_rms_norm.gate import pytest_gate

    def check(target: Any, expect: str = "", **options: Any) -> Report:
        __tracebackhide__ = True
        report = pytest_gate.run(target, expect, **options)
        if report.failed:
            pytest.fail(report.as_text(), pytrace=False)
        if not report.holds:
            pytest.skip(report.verdict())
        return report

    return check
