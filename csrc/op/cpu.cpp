#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/isa.h"
#include "op/launch.h"

namespace automodel::op {
namespace {

// Rows that are worth another thread: about 32 Ki elements.
int64_t grain_rows(int64_t hidden) { return std::max<int64_t>(1, 32768 / hidden); }

struct CpuDevice {
  explicit CpuDevice(const at::Tensor& /*x*/) {}

  void forward(const numerics::ForwardParams& params) {
    at::parallel_for(0, params.rows, grain_rows(params.hidden),
                     [&](int64_t begin, int64_t end) { kernels_.forward(params, begin, end); });
  }

  // Some units for each thread, so that they balance.
  int64_t unit_leaves(const numerics::BackwardParams& params) {
    const int64_t wanted = 4 * at::get_num_threads();
    int64_t leaves = 1;
    while (numerics::leaves_in(params.rows) / leaves > wanted) leaves *= 2;
    return leaves;
  }

  void backward(const numerics::BackwardParams& params) {
    const bool want_weight = params.grad_weight != nullptr;
    const int64_t unit_rows = params.unit_leaves * numerics::kLeafRows;
    const int64_t grain = std::max<int64_t>(1, grain_rows(params.hidden) / unit_rows);
    at::parallel_for(0, params.units, grain, [&](int64_t begin, int64_t end) {
      // Room for doubles serves both accumulate types.
      std::vector<double> scratch(want_weight ? cpu::backward_scratch_elements(params) : 0);
      kernels_.backward(params, begin, end, scratch.data());
    });
    if (!want_weight) return;
    at::parallel_for(0, params.hidden, 1024, [&](int64_t begin, int64_t end) {
      kernels_.join_partials(params, begin, end);
    });
  }

 private:
  const cpu::Kernels& kernels_ = *cpu::active_isa().kernels;
};

}  // namespace

TORCH_LIBRARY_IMPL(automodel, CPU, m) { Ops<CpuDevice>::register_in(m); }

}  // namespace automodel::op
