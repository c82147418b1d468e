// The CPU kernels: one table of functions for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/params.h"
#include "numerics/spec.h"

namespace automodel::cpu {

struct Kernels {
  // Rows [begin, end) of y and rstd.
  void (*forward)(const numerics::ForwardParams&, int64_t begin, int64_t end);
  // Units [begin, end): their rows of grad_x, their rows of partials. scratch holds
  // backward_scratch_elements(params) elements of A and belongs to this call alone; it may be null
  // without grad_weight.
  void (*backward)(const numerics::BackwardParams&, int64_t begin, int64_t end, void* scratch);
  // Columns [begin, end) of grad_weight, from all units of partials.
  void (*join_partials)(const numerics::BackwardParams&, int64_t begin, int64_t end);
};

// A row for each level of a unit's tree. Here, and in CUDA's kernels for rows of any length, all
// units are whole.
inline int64_t backward_scratch_elements(const numerics::BackwardParams& params) {
  return numerics::tree_levels(params.units.leaves) * params.hidden;
}

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace automodel::cpu
