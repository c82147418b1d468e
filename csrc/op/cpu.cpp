#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "cpu/isa.h"
#include "op/launch.h"

namespace automodel::op {
namespace {

// Rows that are worth another thread: about 32 Ki elements.
int64_t grain_rows(int64_t hidden) { return std::max<int64_t>(1, 32768 / hidden); }

// The first write of an output costs a page fault for each of its pages, which together take longer
// than the kernel. Where the system leaves the choice to programs this makes them pages of 2 MiB.
// Smaller outputs than kNew may lie where others did and have their pages.
void advise_huge_pages([[maybe_unused]] void* output, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kNew = int64_t{32} << 20;  // what glibc always maps anew
  if (output == nullptr || bytes < kNew) return;
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(output);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  // A kernel without huge pages refuses, and nothing is lost.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Of an output like x.
template <class Params>
int64_t output_bytes(const Params& params) {
  return params.rows * params.hidden * numerics::element_size(params.x_dtype);
}

struct CpuDevice {
  explicit CpuDevice(const at::Tensor& /*x*/) {}

  void forward(const numerics::ForwardParams& params) {
    for (void* output : {params.y, params.sum}) advise_huge_pages(output, output_bytes(params));
    at::parallel_for(0, params.rows, grain_rows(params.hidden),
                     [&](int64_t begin, int64_t end) { kernels_.forward(params, begin, end); });
  }

  // Some units for each thread, so that they balance.
  numerics::Units units(const numerics::BackwardParams& params) {
    const int64_t wanted = 4 * at::get_num_threads();
    int64_t leaves = 1;
    while (numerics::leaves_in(params.rows) / leaves > wanted) leaves *= 2;
    return numerics::whole_units(params.rows, leaves);
  }

  void backward(const numerics::BackwardParams& params) {
    advise_huge_pages(params.grad_x, output_bytes(params));
    const bool want_weight = params.grad_weight != nullptr;
    const int64_t unit_rows = params.units.leaves * numerics::kLeafRows;
    const int64_t grain = std::max<int64_t>(1, grain_rows(params.hidden) / unit_rows);
    at::parallel_for(0, params.units.count, grain, [&](int64_t begin, int64_t end) {
      // Room for doubles serves both accumulate types.
      const std::unique_ptr<double[]> scratch(
          want_weight ? new double[cpu::backward_scratch_elements(params)] : nullptr);
      kernels_.backward(params, begin, end, scratch.get());
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
