#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace automodel::cpu {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
// By hand, for clang 14's __builtin_cpu_supports does not know f16c.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Slowest first.
constexpr Isa kIsas[] = {
    {"scalar", always, &kScalarKernels},
#if defined(__x86_64__)
    {"avx2", has_avx2, &kAvx2Kernels},
    {"avx512", has_avx512, &kAvx512Kernels},
#elif defined(__aarch64__)
    {"neon", always, &kNeonKernels},
#endif
};

const Isa* find(const std::string& name) {
  std::string names;
  for (const Isa* isa : supported_isas()) {
    if (name == isa->name) return isa;
    names += names.empty() ? isa->name : std::string(", ") + isa->name;
  }
  throw std::invalid_argument("automodel-rms-norm: CPU instruction set '" + name +
                              "' is not one that this machine and build have; choose from " +
                              names);
}

std::atomic<const Isa*> forced{nullptr};

const Isa* default_isa() {
  const char* name = std::getenv("AUTOMODEL_RMS_NORM_CPU");
  return name != nullptr && *name != '\0' ? find(name) : supported_isas().back();
}

}  // namespace

std::vector<const Isa*> supported_isas() {
  std::vector<const Isa*> result;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) result.push_back(&isa);
  }
  return result;
}

const Isa& active_isa() {
  const Isa* isa = forced.load(std::memory_order_acquire);
  if (isa != nullptr) return *isa;
  static const Isa* const chosen = default_isa();
  return *chosen;
}

void force_isa(const std::string& name) { forced.store(find(name), std::memory_order_release); }

}  // namespace automodel::cpu
