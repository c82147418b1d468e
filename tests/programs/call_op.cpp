// call_op LIBRARY INPUTS OUTPUTS: y, grad_x and grad_weight of x, weight, grad_y, and the same and
// sum with x as the residual of itself, through the public header. The files are Python's torch.save and torch.load of a tuple of tensors.
#include <automodel/rms_norm.h>
#include <torch/csrc/autograd/autograd.h>

#include <iostream>

#include "program.h"

namespace {

constexpr double kEps = 1e-5;

std::string message_without_library(const at::Tensor& x) {
  try {
    automodel::rms_norm(x, std::nullopt, kEps);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  auto inputs = program::load(argv[2]);
  const at::Tensor x = inputs[0].set_requires_grad(true);
  const at::Tensor weight = inputs[1].set_requires_grad(true);

  std::cout << message_without_library(x) << std::endl;
  program::open_library(argv[1]);
  std::vector<at::Tensor> outputs;
  for (const bool zero_centered_gamma : {false, true}) {
    const at::Tensor y = automodel::rms_norm(x, weight, kEps, zero_centered_gamma);
    const auto grads = torch::autograd::grad({y}, {x, weight}, {inputs[2]});
    outputs.insert(outputs.end(), {y.detach(), grads[0], grads[1]});
  }
  outputs.push_back(automodel::rms_norm(x.detach(), std::nullopt, kEps));
  const auto [y, sum] = automodel::add_rms_norm(x, x.detach(), weight, kEps);
  const auto grads = torch::autograd::grad({y, sum}, {x, weight}, {inputs[2], inputs[2]});
  outputs.insert(outputs.end(), {y.detach(), sum.detach(), grads[0], grads[1]});
  program::save(argv[3], outputs);
}
