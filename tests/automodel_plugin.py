"""A pytest plugin that runs AutoModel's own tests with the op: docs/automodel.md."""

from automodel_rms_norm.integrations import automodel


def pytest_configure() -> None:
    automodel.enable()
