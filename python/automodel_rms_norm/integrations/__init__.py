"""The op in the stacks that people train with. No stack is imported unless it is asked for."""

from automodel_rms_norm.integrations._patching import IntegrationError

__all__ = ["IntegrationError"]
