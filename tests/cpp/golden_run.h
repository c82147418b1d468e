// Runs one problem (a GoldenCase) through a table of kernels, in buffers of the exact size, so that
// AddressSanitizer sees every access outside of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "numerics/dispatch.h"
#include "numerics/golden_inputs.h"
#include "numerics/params.h"
#include "numerics/spec.h"
#include "numerics/types.h"

namespace automodel::testing {

using numerics::DType;
using numerics::GoldenCase;
using numerics::GoldenDigests;
using numerics::GoldenStream;

using Bytes = std::vector<unsigned char>;

struct Inputs {
  Bytes x;
  Bytes weight;  // empty without weight
  Bytes grad_y;
  Bytes residual;  // empty without residual
  Bytes grad_sum;  // empty without residual
};

struct Outputs {
  Bytes y;
  Bytes rstd;
  Bytes grad_x;
  Bytes grad_weight;  // empty without weight
  Bytes sum;          // empty without residual
};

inline size_t size_of(DType dtype) { return static_cast<size_t>(numerics::element_size(dtype)); }

inline DType accumulate_dtype(const GoldenCase& c) {
  return c.x_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline Bytes buffer(DType dtype, int64_t count) {
  return Bytes(size_of(dtype) * static_cast<size_t>(count));
}

inline Bytes make_stream(const GoldenCase& c, uint64_t number, GoldenStream stream) {
  const bool is_weight = stream == GoldenStream::kWeight;
  const DType dtype = is_weight ? c.weight_dtype : c.x_dtype;
  Bytes bytes = buffer(dtype, is_weight ? c.hidden : c.rows * c.hidden);
  if (dtype == DType::kNone) return bytes;
  numerics::visit_x(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      const T value = numerics::round_to<T>(numerics::golden_value(c, number, stream, i));
      memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

inline Inputs make_inputs(const GoldenCase& c, uint64_t number) {
  Inputs inputs{make_stream(c, number, GoldenStream::kX),
                make_stream(c, number, GoldenStream::kWeight),
                make_stream(c, number, GoldenStream::kGradY),
                {},
                {}};
  if (c.residual) {
    inputs.residual = make_stream(c, number, GoldenStream::kResidual);
    inputs.grad_sum = make_stream(c, number, GoldenStream::kGradSum);
  }
  return inputs;
}

inline Outputs make_outputs(const GoldenCase& c) {
  return {buffer(c.x_dtype, c.rows * c.hidden), buffer(accumulate_dtype(c), c.rows),
          buffer(c.x_dtype, c.rows * c.hidden), buffer(c.weight_dtype, c.hidden),
          buffer(c.residual ? c.x_dtype : DType::kNone, c.rows * c.hidden)};
}

inline numerics::RowLayout contiguous_rows(const GoldenCase& c) {
  return {1, {c.hidden}, {c.rows}};
}

// The pointers may be to any device.
struct Pointers {
  const void* x;
  const void* weight;
  const void* grad_y;
  const void* residual;
  const void* grad_sum;
  void* y;
  void* rstd;
  void* grad_x;
  void* grad_weight;
  void* sum;
};

inline Pointers pointers(const Inputs& in, Outputs& out) {
  const auto data_or_null = [](auto& bytes) { return bytes.empty() ? nullptr : bytes.data(); };
  return {in.x.data(),
          data_or_null(in.weight),
          in.grad_y.data(),
          data_or_null(in.residual),
          data_or_null(in.grad_sum),
          out.y.data(),
          out.rstd.data(),
          out.grad_x.data(),
          data_or_null(out.grad_weight),
          data_or_null(out.sum)};
}

inline numerics::ForwardParams forward_params(const GoldenCase& c, const Pointers& p) {
  numerics::ForwardParams params{};
  params.x = p.x;
  params.x_layout = contiguous_rows(c);
  params.residual = p.residual;
  params.residual_layout = contiguous_rows(c);
  params.weight = p.weight;
  params.y = p.y;
  params.sum = p.sum;
  params.rstd = p.rstd;
  params.rows = c.rows;
  params.hidden = c.hidden;
  params.eps = c.eps;
  params.x_dtype = c.x_dtype;
  params.weight_dtype = c.weight_dtype;
  params.zero_centered_gamma = c.zero_centered_gamma;
  return params;
}

// Without partials: the caller has to set them where there is a grad_weight.
inline numerics::BackwardParams backward_params(const GoldenCase& c, const Pointers& p,
                                                int64_t unit_leaves) {
  numerics::BackwardParams params{};
  params.grad_y = p.grad_y;
  params.grad_y_layout = contiguous_rows(c);
  params.grad_sum = p.grad_sum;
  params.grad_sum_layout = contiguous_rows(c);
  params.x = c.residual ? p.sum : p.x;
  params.x_layout = contiguous_rows(c);
  params.weight = p.weight;
  params.rstd = p.rstd;
  params.grad_x = p.grad_x;
  params.grad_weight = p.grad_weight;
  params.rows = c.rows;
  params.hidden = c.hidden;
  params.units = numerics::whole_units(c.rows, unit_leaves);
  params.x_dtype = c.x_dtype;
  params.weight_dtype = c.weight_dtype;
  params.zero_centered_gamma = c.zero_centered_gamma;
  return params;
}

// All units, with a fresh scratch and fresh partials.
inline void run_backward(const cpu::Kernels& kernels, numerics::BackwardParams params) {
  const DType a = params.x_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Bytes partials, scratch;
  if (params.grad_weight != nullptr) {
    partials = buffer(a, params.units.count * params.hidden);
    scratch = buffer(a, cpu::backward_scratch_elements(params));
    params.partials = partials.data();
  }
  kernels.backward(params, 0, params.units.count, scratch.data());
  if (params.grad_weight != nullptr) kernels.join_partials(params, 0, params.hidden);
}

inline Outputs run(const cpu::Kernels& kernels, const GoldenCase& c, const Inputs& inputs,
                   int64_t unit_leaves = 1) {
  Outputs outputs = make_outputs(c);
  const Pointers p = pointers(inputs, outputs);
  kernels.forward(forward_params(c, p), 0, c.rows);
  run_backward(kernels, backward_params(c, p, unit_leaves));
  return outputs;
}

inline uint64_t digest_of(const Bytes& bytes, DType dtype) {
  const size_t size = size_of(dtype);
  uint64_t digest = 0;
  for (uint64_t i = 0; size != 0 && i < bytes.size() / size; ++i) {
    uint64_t bits = 0;  // little-endian, as every machine that this is built for
    memcpy(&bits, bytes.data() + i * size, size);
    digest += numerics::digest_term(bits, i);
  }
  return digest;
}

inline GoldenDigests digests_of(const GoldenCase& c, const Outputs& outputs) {
  return {digest_of(outputs.y, c.x_dtype), digest_of(outputs.rstd, accumulate_dtype(c)),
          digest_of(outputs.grad_x, c.x_dtype), digest_of(outputs.grad_weight, c.weight_dtype),
          digest_of(outputs.sum, c.x_dtype)};
}

inline std::string name_of(const GoldenCase& c, int64_t number) {
  constexpr const char* kDTypes[] = {"bf16", "fp16", "fp32", "fp64", "none"};
  constexpr const char* kKinds[] = {"plain", "tiny", "huge", "spiky", "zero_rows"};
  return std::to_string(number) + ": " + std::to_string(c.rows) + "x" + std::to_string(c.hidden) +
         " " + kDTypes[static_cast<int>(c.x_dtype)] + " weight " +
         kDTypes[static_cast<int>(c.weight_dtype)] + (c.zero_centered_gamma ? "+1 " : " ") +
         kKinds[static_cast<int>(c.kind)] + (c.residual ? " residual" : "");
}

}  // namespace automodel::testing
