#include "op/derivatives.h"

#include <ATen/ATen.h>

#include <numeric>

namespace automodel::op {

at::Tensor plus(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}
namespace {

// Differences and products in which an undefined tensor is zero.
at::Tensor minus(const at::Tensor& a, const at::Tensor& b) {
  if (!b.defined()) return a;
  return a.defined() ? a - b : -b;
}
at::Tensor times(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? a * b : at::Tensor();
}
at::Tensor row_mean(const at::Tensor& a) { return a.defined() ? a.mean(-1, true) : a; }
at::Tensor to(const at::Tensor& a, at::ScalarType type) { return a.defined() ? a.to(type) : a; }

at::Tensor sum_of_rows(const at::Tensor& a) {
  if (!a.defined() || a.dim() == 1) return a;
  c10::DimVector outer(a.dim() - 1);
  std::iota(outer.begin(), outer.end(), 0);
  return a.sum(outer);
}

// The names of the contract, in type A, rstd with a last dimension of 1. w is undefined without
// weight, where it is 1.
struct Names {
  at::ScalarType type;
  at::Tensor x, w, r, xhat;
  c10::SymInt hidden;

  explicit Names(const Point& at)
      : type(accumulate_type(at.x.scalar_type())),
        x(at.x.to(type)),
        w(to(at.weight, type)),
        r(at.rstd.unsqueeze(-1)),
        xhat(x * r),
        hidden(at.x.sym_size(-1)) {
    if (w.defined() && at.zero_centered_gamma) w = w + 1;
  }

  at::Tensor gained(const at::Tensor& a) const { return w.defined() ? times(a, w) : a; }
  at::Tensor widened(const at::Tensor& a) const { return to(a, type); }
};

}  // namespace

at::Tensor grad_x_of_rstd(const Point& at, const at::Tensor& grad_rstd) {
  const Names n(at);
  const at::Tensor scale = (grad_rstd.unsqueeze(-1) * n.r * n.r).div(at::Scalar(n.hidden));
  return (-scale * n.xhat).to(at.x.scalar_type());
}

ForwardTangents forward_tangents(const Point& at, const at::Tensor& x_tangent,
                                 const at::Tensor& weight_tangent) {
  const Names n(at);
  const at::Tensor dx = n.widened(x_tangent);
  const at::Tensor dr = minus({}, times(n.r * n.r, row_mean(times(n.xhat, dx))));
  const at::Tensor dxhat = plus(times(dx, n.r), times(n.x, dr));
  const at::Tensor dy = plus(n.gained(dxhat), times(n.xhat, n.widened(weight_tangent)));
  return {to(dy, at.x.scalar_type()), dr.defined() ? dr.squeeze(-1) : dr};
}

BackwardTangents backward_tangents(const Point& at, const at::Tensor& grad_y, const Point& tangents,
                                   const at::Tensor& grad_y_tangent) {
  const Names n(at);
  const at::Tensor g = n.widened(grad_y);
  const at::Tensor dg = n.widened(grad_y_tangent);
  const at::Tensor dr = tangents.rstd.defined() ? tangents.rstd.unsqueeze(-1) : at::Tensor();
  const at::Tensor dxhat = plus(times(n.widened(tangents.x), n.r), times(n.x, dr));
  const at::Tensor t = n.gained(g);
  const at::Tensor dt = plus(n.gained(dg), times(g, n.widened(tangents.weight)));
  const at::Tensor c = row_mean(t * n.xhat);
  const at::Tensor dc = row_mean(plus(times(dt, n.xhat), times(t, dxhat)));
  const at::Tensor inner = minus(minus(dt, times(dxhat, c)), times(n.xhat, dc));
  const at::Tensor grad_x = plus(times(dr, t - n.xhat * c), times(n.r, inner));
  const at::Tensor grad_weight = sum_of_rows(plus(times(dg, n.xhat), times(g, dxhat)));
  return {to(grad_x, at.x.scalar_type()),
          at.weight.defined() ? to(grad_weight, at.weight.scalar_type()) : at::Tensor()};
}

SecondGradients second_gradients(const Point& at, const at::Tensor& grad_y,
                                 const at::Tensor& of_grad_x, const at::Tensor& of_grad_weight) {
  const Names n(at);
  const at::Tensor g = n.widened(grad_y);
  const at::Tensor v = n.widened(of_grad_x);
  const at::Tensor u = n.widened(of_grad_weight);
  const at::Tensor t = n.gained(g);
  const at::Tensor c = row_mean(t * n.xhat);
  const at::Tensor a = row_mean(times(v, n.xhat));
  const at::Tensor of_t = times(n.r, minus(v, times(n.xhat, a)));
  const at::Tensor of_xhat = minus(times(u, g), times(n.r, plus(times(c, v), times(a, t))));
  const at::Tensor of_r = plus(times(t - n.xhat * c, v), times(of_xhat, n.x));
  const at::ScalarType type = at.x.scalar_type();
  return {
      to(plus(n.gained(of_t), times(u, n.xhat)), type), to(times(of_xhat, n.r), type),
      at.weight.defined() ? to(sum_of_rows(times(g, of_t)), at.weight.scalar_type()) : at::Tensor(),
      of_r.defined() ? of_r.sum(-1) : of_r};
}

}  // namespace automodel::op
