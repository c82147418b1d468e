// Tests with every instruction set that this machine has: the parameter is its name.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace automodel::testing {

class EachIsa : public ::testing::TestWithParam<std::string> {
 protected:
  static const cpu::Kernels& kernels() {
    for (const cpu::Isa* isa : cpu::supported_isas()) {
      if (GetParam() == isa->name) return *isa->kernels;
    }
    throw std::logic_error("no such instruction set");
  }
};

inline std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const cpu::Isa* isa : cpu::supported_isas()) names.push_back(isa->name);
  return names;
}

inline std::string isa_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

#define INSTANTIATE_FOR_EACH_ISA(suite) \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, ::testing::ValuesIn(isa_names()), isa_name)

}  // namespace automodel::testing
