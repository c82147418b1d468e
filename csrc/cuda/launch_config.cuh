// Launches with more shared memory than every kernel may have, in clusters, or before the previous
// kernel has ended.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/device_limits.h"

namespace automodel::cuda {

// Clusters, and the overlap of kernels in a stream: sm_90 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AUTOMODEL_HAS_CLUSTERS 1
#endif

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char automodel_dynamic_shared[];
  return reinterpret_cast<T*>(automodel_dynamic_shared);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// What the previous kernel wrote can be read after this.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(AUTOMODEL_HAS_CLUSTERS)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks begin, up to their wait_for_previous_kernel, once every block of
// this one has come here.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(AUTOMODEL_HAS_CLUSTERS)
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Lets a kernel be launched with so many bytes of dynamic shared memory.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

class LaunchConfig {
 public:
  LaunchConfig(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared;
    config_.stream = stream;
  }

  void set_cluster(int blocks) {
    if (blocks == 1) return;
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }

  // The kernel may begin before the previous one has ended, and waits for it itself. Only for code
  // that was compiled for this.
  void overlap_previous_kernel() {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }

  // How many such clusters the device holds at once.
  template <class Kernel>
  cudaError_t count_clusters(Kernel* kernel, int* clusters) {
    config_.attrs = attributes_;
    return cudaOccupancyMaxActiveClusters(clusters, kernel, &config_);
  }

  // An error where the current device cannot grant the shared memory.
  template <class... Parameters, class... Arguments>
  cudaError_t launch(void (*kernel)(Parameters...), Arguments... arguments) {
    constexpr size_t kAlwaysAllowed = 48 * 1024 - kStaticShared;
    if (config_.dynamicSmemBytes > kAlwaysAllowed) {
      // The attribute is the kernel's, not the launch's: a constant, or a thread that launches with
      // less would take it from one that launches with more.
      const cudaError_t error = allow_shared(kernel, device_limits().shared_per_block);
      if (error != cudaSuccess) return error;
    }
    config_.attrs = attributes_;  // here, for this may be a copy
    return cudaLaunchKernelEx(&config_, kernel, arguments...);
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

}  // namespace automodel::cuda
