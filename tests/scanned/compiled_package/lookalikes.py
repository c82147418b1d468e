"""Nothing here is torch.compile, torch.nn.Module.compile, an op or an autograd.Function."""

import re
from re import compile

import cutlass.cute as cute
import torch
import triton
from jinja2 import Environment
from somewhere import Function, Library, custom_op

PATTERN = re.compile("torch.compile")
SAME = compile("x")
TEXT = "@torch.compile\ndef f(): torch.compile(g)"


def builds_kernels(arguments):
    kernel = cute.compile(arguments, options="--enable-tvm-ffi")
    return triton.compile(kernel)


def template(source):
    return Environment().compile(source)


def keras(model):
    model.compile(optimizer="adam", loss="mse")


def builtin(source):
    return __builtins__.compile(source, "file", "exec")


class Engine:
    def __init__(self, compile: bool):
        self.compile_it = compile  # torch.compile(this)

    def compile(self):
        return self

    def run(self):
        return self.compile()


def engine():
    made = Engine(True)
    made.compile()
    Engine(False).compile()


@torch.compiler.disable
def disabled(x):
    return torch.compiler.is_compiling()


@torch.jit.script
def scripted(x):
    return x


def local():
    torch = Environment()
    return torch.compile("text")


def parameter(torch, function):
    return torch.compile(function, 1)


def compile_of_another_kind(function):
    return function


@compile_of_another_kind
def untouched(x):
    return x


@custom_op("not::torch")
def elsewhere(x):
    return x


Library("x").define("y")


class NotAutograd(Function):
    pass


class Config:
    compile: bool = False
    fullgraph = hasattr(torch, "compile")
