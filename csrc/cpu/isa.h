// Which instruction set's kernels run: the best one that this machine has, unless the environment
// variable AUTOMODEL_RMS_NORM_CPU or force_isa names another.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace automodel::cpu {

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernels* kernels;
};

// The instruction sets compiled in that this machine supports, slowest first. "scalar" always is.
std::vector<const Isa*> supported_isas();

// Throws std::invalid_argument, with the possible names, where the name in the environment variable
// is not one of them.
const Isa& active_isa();

// Makes `name` the active one for the whole process. Throws like active_isa.
void force_isa(const std::string& name);

}  // namespace automodel::cpu
