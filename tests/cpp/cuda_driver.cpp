// Runs the CUDA kernels without torch; small and deterministic, for compute-sanitizer. Buffers have
// the exact size, so memcheck sees every access outside of them. The golden cases are compared with
// their digests; then rows of each kind, with the same rows unaligned, which other kernels take.
//
//   cuda_driver [largest number of elements of a case to run]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/device_limits.h"
#include "cuda/launch.h"
#include "golden_run.h"
#include "numerics/golden.h"

namespace automodel::testing {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CHECK_CUDA(call) check(call, #call)

class DeviceBuffer {
 public:
  // Null without bytes.
  explicit DeviceBuffer(size_t bytes) {
    if (bytes != 0) CHECK_CUDA(cudaMalloc(&data_, bytes));
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
};

// How a case is run, other than as it is.
struct Variant {
  const char* name;
  int64_t shift;  // elements before the first row, which takes its alignment
  int64_t gap;    // elements after each row of the inputs
  bool want_grad_x;
  bool want_grad_weight;
};
constexpr Variant kVariants[] = {{"whole", 0, 0, true, true},
                                 {"unaligned", 1, 3, true, true},
                                 {"unaligned, x frozen", 1, 0, false, true},
                                 {"x frozen", 0, 0, false, true},
                                 {"weight frozen", 0, 0, true, false}};

// `rows` rows of `bytes` on the device; the buffer ends with the last one.
class DeviceRows {
 public:
  DeviceRows(DType dtype, int64_t rows, int64_t hidden, const Variant& variant)
      : row_(size_of(dtype) * static_cast<size_t>(hidden)),
        pitch_(row_ + size_of(dtype) * static_cast<size_t>(variant.gap)),
        shift_(size_of(dtype) * static_cast<size_t>(variant.shift)),
        rows_(row_ == 0 ? 0 : static_cast<size_t>(rows)),
        buffer_(rows_ == 0 ? 0 : shift_ + pitch_ * (rows_ - 1) + row_) {}

  void* data() const { return rows_ == 0 ? nullptr : buffer_.data() + shift_; }

  void upload(const Bytes& bytes) {
    if (rows_ == 0) return;
    CHECK_CUDA(
        cudaMemcpy2D(data(), pitch_, bytes.data(), row_, row_, rows_, cudaMemcpyHostToDevice));
  }

  void download(Bytes& bytes) const {
    if (rows_ == 0) return;
    CHECK_CUDA(
        cudaMemcpy2D(bytes.data(), row_, data(), pitch_, row_, rows_, cudaMemcpyDeviceToHost));
  }

 private:
  size_t row_;
  size_t pitch_;
  size_t shift_;
  size_t rows_;
  DeviceBuffer buffer_;
};

Outputs run_on_device(const GoldenCase& c, const Inputs& inputs, const Variant& variant) {
  Variant dense = variant;
  dense.gap = 0;
  const DType a = accumulate_dtype(c);
  const DType added = c.residual ? c.x_dtype : DType::kNone;
  DeviceRows x(c.x_dtype, c.rows, c.hidden, variant);
  DeviceRows grad_y(c.x_dtype, c.rows, c.hidden, variant);
  DeviceRows residual(added, c.rows, c.hidden, variant);
  DeviceRows grad_sum(added, c.rows, c.hidden, variant);
  DeviceRows weight(c.weight_dtype, 1, c.hidden, dense);
  DeviceRows y(c.x_dtype, c.rows, c.hidden, dense);
  DeviceRows rstd(a, 1, c.rows, dense);
  DeviceRows grad_x(c.x_dtype, c.rows, c.hidden, dense);
  DeviceRows grad_weight(c.weight_dtype, 1, c.hidden, dense);
  DeviceRows sum(added, c.rows, c.hidden, dense);
  x.upload(inputs.x);
  grad_y.upload(inputs.grad_y);
  residual.upload(inputs.residual);
  grad_sum.upload(inputs.grad_sum);
  weight.upload(inputs.weight);

  const Pointers p{x.data(),
                   weight.data(),
                   grad_y.data(),
                   residual.data(),
                   grad_sum.data(),
                   y.data(),
                   rstd.data(),
                   variant.want_grad_x ? grad_x.data() : nullptr,
                   variant.want_grad_weight ? grad_weight.data() : nullptr,
                   sum.data()};
  auto forward = forward_params(c, p);
  forward.x_layout.strides[0] += variant.gap;
  forward.residual_layout.strides[0] += variant.gap;
  CHECK_CUDA(cuda::launch_forward(forward, nullptr));

  auto backward = backward_params(c, p, 1);
  if (!c.residual) backward.x_layout.strides[0] += variant.gap;
  backward.grad_y_layout.strides[0] += variant.gap;
  backward.grad_sum_layout.strides[0] += variant.gap;
  backward.units = cuda::choose_units(backward);
  const bool has_partials = backward.grad_weight != nullptr;
  DeviceRows partials(a, has_partials ? backward.units.count : 0, c.hidden, dense);
  backward.partials = has_partials ? partials.data() : nullptr;
  CHECK_CUDA(cuda::launch_backward(backward, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());

  Outputs outputs = make_outputs(c);
  y.download(outputs.y);
  rstd.download(outputs.rstd);
  sum.download(outputs.sum);
  if (variant.want_grad_x) grad_x.download(outputs.grad_x);
  if (variant.want_grad_weight) grad_weight.download(outputs.grad_weight);
  return outputs;
}

// The name of the first output, or digest of one, that differs; null if none does.
template <class Results>
const char* first_difference(const Results& got, const Results& expected, const Variant& variant) {
  if (got.sum != expected.sum) return "sum";
  if (got.y != expected.y) return "y";
  if (got.rstd != expected.rstd) return "rstd";
  if (variant.want_grad_x && got.grad_x != expected.grad_x) return "grad_x";
  if (variant.want_grad_weight && got.grad_weight != expected.grad_weight) return "grad_weight";
  return nullptr;
}

void fill(Bytes& bytes, DType dtype, uint64_t seed) {
  if (bytes.empty()) return;
  uint64_t state = seed;
  numerics::visit_x(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const T value = numerics::round_to<T>(static_cast<float>(state >> 40) * 0x1p-22f - 2.0f);
      memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
}

Inputs fill_inputs(const GoldenCase& c) {
  const DType added = c.residual ? c.x_dtype : DType::kNone;
  Inputs inputs{buffer(c.x_dtype, c.rows * c.hidden), buffer(c.weight_dtype, c.hidden),
                buffer(c.x_dtype, c.rows * c.hidden), buffer(added, c.rows * c.hidden),
                buffer(added, c.rows * c.hidden)};
  fill(inputs.x, c.x_dtype, 1);
  fill(inputs.weight, c.weight_dtype, 2);
  fill(inputs.grad_y, c.x_dtype, 3);
  fill(inputs.residual, c.x_dtype, 4);
  fill(inputs.grad_sum, c.x_dtype, 5);
  return inputs;
}

// Returns how many runs matched; throws where one does not.
int run_kinds(int64_t max_elements) {
  int runs = 0;
  const auto run_kind = [&](const GoldenCase& c) {
    const Inputs inputs = fill_inputs(c);
    const Variant& unaligned = kVariants[1];
    const Outputs expected = run_on_device(c, inputs, unaligned);
    for (const Variant& variant : {kVariants[0], kVariants[4]}) {
      const Outputs got = run_on_device(c, inputs, variant);
      const char* difference = first_difference(got, expected, variant);
      if (difference != nullptr) {
        throw std::runtime_error(name_of(c, runs) + " (" + variant.name + "): " + difference +
                                 " differs from that of unaligned rows");
      }
      ++runs;
    }
  };
  const auto run_dtypes = [&](int64_t rows, int64_t hidden) {
    if (rows * hidden > max_elements) return;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const bool residual : {false, true}) {
        run_kind({rows, hidden, dtype, dtype, true, 1e-5, numerics::GoldenKind::kPlain, residual});
      }
    }
  };
  // Two to four chunks of each virtual thread, and rows enough for the kernels of whole rows.
  for (int64_t threads = numerics::kMinVirtualThreads; threads <= numerics::kMaxVirtualThreads;
       threads *= 2) {
    for (int64_t chunks : {2 * threads, 3 * threads - 1, 3 * threads, 4 * threads - 1}) {
      const int64_t hidden = chunks * numerics::kSlots;
      run_dtypes(std::max<int64_t>(269, std::min<int64_t>(3 * (1 << 19) / hidden, 2048) + 13),
                 hidden);
    }
  }
  // Blocks of a cluster share a unit; a thread holds several rows.
  const int64_t multiprocessors = cuda::device_limits().multiprocessors;
  run_dtypes(16 * multiprocessors + 5, 8184);
  run_dtypes(192 * multiprocessors + 5, 128);
  run_dtypes(12 * multiprocessors + 5, 2048);
  return runs;
}

int run_all(int64_t max_elements) {
  int runs = 0;
  for (int number = 0; number < numerics::kGoldenCaseCount; ++number) {
    const GoldenCase& c = numerics::kGoldenCases[number];
    if (c.rows * c.hidden > max_elements) continue;
    const Inputs inputs = make_inputs(c, number);
    for (const Variant& variant : kVariants) {
      const std::string name = name_of(c, number) + " (" + variant.name + ")";
      try {
        const GoldenDigests got = digests_of(c, run_on_device(c, inputs, variant));
        const char* difference = first_difference(got, numerics::kGoldenDigests[number], variant);
        if (difference != nullptr) {
          std::printf("%s: %s differs from the golden digest\n", name.c_str(), difference);
          return 1;
        }
      } catch (const std::runtime_error& error) {
        std::printf("%s: %s\n", name.c_str(), error.what());
        return 1;
      }
      ++runs;
    }
  }
  std::printf("%d runs, all digests as in numerics/golden.h\n", runs);
  try {
    std::printf("%d runs of each kind of row, all as unaligned rows\n", run_kinds(max_elements));
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return runs > 0 ? 0 : 1;
}

}  // namespace
}  // namespace automodel::testing

int main(int argc, char** argv) {
  return automodel::testing::run_all(argc > 1 ? std::atoll(argv[1]) : INT64_MAX);
}
