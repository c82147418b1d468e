#include <array>
#include <mutex>

#include "cuda/backward_plan.h"
#include "cuda/launch.h"
#include "cuda/launch_config.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {
namespace {

__global__ void probe_kernel() {}

DeviceLimits read_limits(int device) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    cudaDeviceGetAttribute(&value, which, device);
    return value;
  };
  cudaFuncAttributes code{};
  cudaFuncGetAttributes(&code, probe_kernel);
  DeviceLimits limits{};
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  const auto shared = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  limits.shared_per_block = shared > kStaticShared ? shared - kStaticShared : 0;
  limits.overlap = attribute(cudaDevAttrClusterLaunch) != 0 && code.ptxVersion >= 90;
  limits.largest_cluster = 1;
  for (const int held : {1, 2}) limits.clustered[held - 1][0] = held * limits.multiprocessors;
  if (!limits.overlap) return limits;
  const auto granted = [](cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();  // or the check of a launch would report it
    return error == cudaSuccess;
  };
  if (!granted(allow_shared(probe_kernel, limits.shared_per_block))) return limits;
  for (int i = 1; 1 << i <= kMaxCluster; ++i) {
    for (const int held : {1, 2}) {
      // With this much shared memory a multiprocessor holds so many.
      LaunchConfig config(dim3(1 << i), dim3(kWarp), limits.shared_per_block / held, nullptr);
      config.set_cluster(1 << i);
      int clusters = 0;
      if (!granted(config.count_clusters(probe_kernel, &clusters)) || clusters == 0) return limits;
      limits.clustered[held - 1][i] = clusters << i;
    }
    limits.largest_cluster = 1 << i;
  }
  return limits;
}

}  // namespace

const DeviceLimits& device_limits() {
  constexpr int kMaxDevices = 128;  // torch has room for 120
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceLimits, kMaxDevices> limits;
  int device = 0;
  cudaGetDevice(&device);
  std::call_once(once.at(device), [&] { limits[device] = read_limits(device); });
  return limits[device];
}

cudaError_t launch_forward(const numerics::ForwardParams& params, cudaStream_t stream) {
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    return launch_forward_as<typename decltype(x)::type>(params, stream);
  });
}

numerics::Units choose_units(const numerics::BackwardParams& params) {
  return plan_backward(params, device_limits()).units;
}

cudaError_t launch_backward(const numerics::BackwardParams& params, cudaStream_t stream) {
  if (params.grad_x == nullptr && params.grad_weight == nullptr) return cudaSuccess;
  const BackwardPlan plan = plan_backward(params, device_limits());
  if (!(plan.units == params.units)) {
    return cudaErrorInvalidValue;  // params have changed since choose_units
  }
  const cudaError_t error = numerics::visit_x(params.x_dtype, [&](auto x) {
    return launch_backward_as<typename decltype(x)::type>(params, plan, stream);
  });
  const bool finished = params.grad_weight == nullptr || (!plan.fused && params.units.count == 1);
  if (error != cudaSuccess || finished) return error;
  return launch_join_partials(params, stream);
}

}  // namespace automodel::cuda
