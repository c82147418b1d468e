// Dynamic shared memory above the 48 KiB that every kernel may have.
#pragma once

#include <cuda_runtime.h>

namespace automodel::cuda {

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char automodel_dynamic_shared[];
  return reinterpret_cast<T*>(automodel_dynamic_shared);
}

// An error where the current device cannot grant `bytes`.
template <class Kernel>
cudaError_t allow_dynamic_shared(Kernel kernel, size_t bytes) {
  constexpr size_t kAlwaysAllowed = 47 * 1024;  // the kernels' static arrays take less than 1 KiB
  if (bytes <= kAlwaysAllowed) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace automodel::cuda
