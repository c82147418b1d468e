// What decides how kernels are launched.
#pragma once

#include <cstddef>

namespace automodel::cuda {

// More than the static arrays of any kernel that also has dynamic shared memory.
constexpr size_t kStaticShared = 5 * 1024;

struct DeviceLimits {
  int multiprocessors;
  size_t shared_per_block;  // dynamic, beside kStaticShared
  // A kernel may begin before the previous one has ended, and blocks may form clusters: the device
  // can do it, and the code that it runs was compiled for it.
  bool overlap;
  int largest_cluster;  // blocks, a power of two; 1 where there are no clusters
  // Blocks that run at once in clusters of 2^i, to largest_cluster, where a multiprocessor holds one
  // block and where it holds two. A cluster stays in one part of the GPU, which it may not fill.
  int clustered[2][4];
};

const DeviceLimits& device_limits();  // of the current device

}  // namespace automodel::cuda
