// What the test programs share: tensors in files, and the op library.
#pragma once

#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace program {

inline std::vector<at::Tensor> load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue value = torch::jit::pickle_load(bytes);
  for (const auto& element : value.toTupleRef().elements()) tensors.push_back(element.toTensor());
  return tensors;
}

inline void save(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline void open_library(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

}  // namespace program
