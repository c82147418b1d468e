import a_dependency_that_is_not_installed
import torch


@torch.compile
def norm(x, weight, eps):
    return a_dependency_that_is_not_installed.norm(x, weight, eps)
