// automodel_rms_norm._C: what the package asks of its C++ side besides the ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "build_config.h"
#include "cpu/isa.h"
#include "numerics/golden.h"
#include "numerics/golden_cases.h"
#include "numerics/spec.h"

namespace py = pybind11;

namespace {

namespace numerics = automodel::numerics;

py::dict build_info() {
  using namespace py::literals;
  namespace config = automodel::build_config;
  return py::dict(
      "version"_a = config::kVersion, "torch"_a = config::kTorchVersion,
      "cuda"_a = config::kCudaVersion, "cuda_architectures"_a = config::kCudaArchitectures,
      "no_cuda_reason"_a = config::kNoCudaReason, "compiler"_a = config::kCompiler,
      "cxx_standard"_a = config::kCxxStandard, "cpu_isas_compiled"_a = config::kCpuLevels);
}

py::dict contract() {
  using namespace py::literals;
  return py::dict("version"_a = numerics::kContractVersion, "slots"_a = numerics::kSlots,
                  "group"_a = numerics::kGroup, "leaf_rows"_a = numerics::kLeafRows,
                  "min_virtual_threads"_a = numerics::kMinVirtualThreads,
                  "max_virtual_threads"_a = numerics::kMaxVirtualThreads);
}

py::list supported_isas() {
  py::list names;
  for (const auto* isa : automodel::cpu::supported_isas()) names.append(isa->name);
  return names;
}

const char* dtype_name(numerics::DType dtype) {
  switch (dtype) {
    case numerics::DType::kBFloat16:
      return "bfloat16";
    case numerics::DType::kFloat16:
      return "float16";
    case numerics::DType::kFloat32:
      return "float32";
    case numerics::DType::kFloat64:
      return "float64";
    default:
      return "none";
  }
}

const char* kind_name(numerics::GoldenKind kind) {
  constexpr const char* kNames[] = {"plain", "tiny", "huge", "spiky", "zero_rows"};
  return kNames[static_cast<int>(kind)];
}

py::list golden_cases() {
  using namespace py::literals;
  py::list cases;
  for (int number = 0; number < numerics::kGoldenCaseCount; ++number) {
    const auto& c = numerics::kGoldenCases[number];
    const auto& digests = numerics::kGoldenDigests[number];
    cases.append(py::dict("number"_a = number, "rows"_a = c.rows, "hidden"_a = c.hidden,
                          "x_dtype"_a = dtype_name(c.x_dtype),
                          "weight_dtype"_a = dtype_name(c.weight_dtype),
                          "zero_centered_gamma"_a = c.zero_centered_gamma, "eps"_a = c.eps,
                          "kind"_a = kind_name(c.kind), "residual"_a = c.residual,
                          "y"_a = digests.y, "rstd"_a = digests.rstd, "grad_x"_a = digests.grad_x,
                          "grad_weight"_a = digests.grad_weight, "sum"_a = digests.sum));
  }
  return cases;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information, the numerics contract and the CPU instruction sets";
  m.def("build_info", build_info, "What this build was made from, as text.");
  m.def("contract", contract, "The version and the constants of the numerics contract.");
  m.def("supported_isas", supported_isas, "CPU instruction sets that can run here, slowest first.");
  m.def(
      "active_isa", [] { return automodel::cpu::active_isa().name; },
      "The CPU instruction set whose kernels run.");
  m.def("force_isa", automodel::cpu::force_isa, py::arg("name"),
        "Make `name` the active instruction set of this process. Raises ValueError if it cannot "
        "run.");
  m.def("golden_cases", golden_cases, "The golden cases with their digests.");
}
