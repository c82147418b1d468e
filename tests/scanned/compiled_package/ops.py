import torch
from torch import autograd
from torch.autograd import Function
from torch.library import Library, custom_op, register_fake, triton_op

library = Library("package", "DEF")
# listed: op schema, , 'scale(Tensor x, float factor) -> Tensor'
library.define("scale(Tensor x, float factor) -> Tensor")


def scale(x, factor):
    return x * factor


# listed: op kernel, , ops:scale
library.impl("scale", scale, "CPU")
# listed: op schema, , 'package::twice'
torch.library.define(
    "package::twice",
    "(Tensor x) -> Tensor",
)


# listed: op kernel, , ops:twice
@torch.library.impl("package::twice", "CPU")
def twice(x):
    return 2 * x


# listed: op kernel, , ops:scale_meta
@torch.library.impl(library, "scale", "Meta")
def scale_meta(x, factor):
    return x.new_empty(x.shape)


# listed: custom op, , ops:norm
@custom_op("package::norm", mutates_args=())
def norm(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


# listed: fake kernel, , ops:norm_fake
@norm.register_fake
def norm_fake(x):
    return torch.empty_like(x)


# listed: op kernel, , ops:norm_cuda
@norm.register_kernel("cuda")
def norm_cuda(x):
    return x.clone()


def norm_backward(ctx, grad):
    return grad


# listed: op autograd, , ops:norm_backward
norm.register_autograd(norm_backward)


# listed: custom op, , ops:kernel
@triton_op("package::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


# listed: fake kernel, , ops:twice_fake
@register_fake("package::twice")
def twice_fake(x):
    return torch.empty_like(x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


# listed: custom op, , ops:plain
op = torch.library.custom_op(
    "package::plain",
    plain,
    mutates_args=(),
)


# listed: custom autograd, , ops:First
class First(torch.autograd.Function):
    pass


# listed: custom autograd, , ops:Second
class Second(autograd.Function):
    pass


# listed: custom autograd, , ops:Third
class Third(Function):
    pass


# listed: custom autograd, , ops:Derived
class Derived(Third):
    pass
