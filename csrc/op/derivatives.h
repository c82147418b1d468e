// Derivatives of the ops that the contract says nothing of: tangents, and gradients of gradients.
// Composed of ATen's operations in type A, so that they have derivatives themselves.
//
// An undefined tensor stands for zeros, among the arguments and the results.
#pragma once

#include <ATen/core/Tensor.h>

#include "op/checks.h"

namespace automodel::op {

// The sum, undefined where both are.
at::Tensor plus(const at::Tensor& a, const at::Tensor& b);

// Where derivatives are taken. x is what was normalised: with a residual the sum.
struct Point {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor rstd;
  bool zero_centered_gamma;
};

// The gradient of x that comes with the gradient of rstd.
at::Tensor grad_x_of_rstd(const Point& at, const at::Tensor& grad_rstd);

struct ForwardTangents {
  at::Tensor y;
  at::Tensor rstd;
};
ForwardTangents forward_tangents(const Point& at, const at::Tensor& x_tangent,
                                 const at::Tensor& weight_tangent);

// Of a backward op's outputs, from those of its arguments, of which rstd is one of its own.
struct BackwardTangents {
  at::Tensor grad_x;
  at::Tensor grad_weight;
};
BackwardTangents backward_tangents(const Point& at, const at::Tensor& grad_y, const Point& tangents,
                                   const at::Tensor& grad_y_tangent);

// Of a backward op's arguments, from those of its outputs.
struct SecondGradients {
  at::Tensor grad_y;
  at::Tensor x;
  at::Tensor weight;
  at::Tensor rstd;
};
SecondGradients second_gradients(const Point& at, const at::Tensor& grad_y,
                                 const at::Tensor& of_grad_x, const at::Tensor& of_grad_weight);

}  // namespace automodel::op
