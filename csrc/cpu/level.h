// One instruction set's kernels. A level_*.cpp file defines AUTOMODEL_CPU_KERNELS, the name of its
// table, is compiled with that set's flags and includes this file alone.
//
// Everything here has internal linkage. Were a template shared between the levels, the linker would
// keep one copy of it, perhaps the AVX-512 one, for all of them.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/kernels.h"
#include "numerics/arithmetic.h"
#include "numerics/dispatch.h"
#include "numerics/params.h"
#include "numerics/spec.h"
#include "numerics/types.h"

namespace automodel::cpu {
namespace {

using numerics::BackwardParams;
using numerics::BFloat16;
using numerics::Float16;
using numerics::ForwardParams;
using numerics::kGroup;
using numerics::kLeafRows;
using numerics::kSlots;
using numerics::NoWeight;

// clang-format off
#include "cpu/float_environment.h"
#include "cpu/vec.h"
#include "cpu/block.h"
#include "cpu/rows.h"
// clang-format on

// Calls f(Type<X>{}, Type<W>{}) with the types of a params struct.
template <class Params, class F>
void visit(const Params& params, const F& f) {
  numerics::visit_x(params.x_dtype, [&](auto x) {
    using X = typename decltype(x)::type;
    numerics::visit_weight<X>(params.weight_dtype, [&](auto w) { f(x, w); });
  });
}

void forward(const ForwardParams& params, int64_t begin, int64_t end) {
  const FloatEnvironment environment;
  visit(params, [&](auto x, auto w) {
    forward_rows<typename decltype(x)::type, typename decltype(w)::type>(params, begin, end);
  });
}

void backward(const BackwardParams& params, int64_t begin, int64_t end, void* scratch) {
  const FloatEnvironment environment;
  visit(params, [&](auto x, auto w) {
    using X = typename decltype(x)::type;
    using W = typename decltype(w)::type;
    const auto units =
        params.grad_weight == nullptr ? backward_units<false, X, W> : backward_units<true, X, W>;
    units(params, begin, end, scratch);
  });
}

void join_partials(const BackwardParams& params, int64_t begin, int64_t end) {
  const FloatEnvironment environment;
  visit(params, [&](auto x, auto w) {
    using A = numerics::Accumulate<typename decltype(x)::type>;
    using W = typename decltype(w)::type;
    if constexpr (!std::is_same_v<W, NoWeight>) join_columns<A, W>(params, begin, end);
  });
}

}  // namespace

const Kernels AUTOMODEL_CPU_KERNELS = {forward, backward, join_partials};

}  // namespace automodel::cpu
