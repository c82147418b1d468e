# The only list of sources; paths are relative to the repository's root.

# One file per CPU instruction set beside the scalar one, and the flags it alone is compiled with.
set(AUTOMODEL_CPU_LEVELS scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND AUTOMODEL_CPU_LEVELS avx2 avx512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  list(APPEND AUTOMODEL_CPU_LEVELS neon)
endif()
set(AUTOMODEL_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(AUTOMODEL_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${AUTOMODEL_FLAGS_avx2})

if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # GCC's own _mm512_undefined_ps is taken for an uninitialised variable (GCC bug 105593).
  list(APPEND AUTOMODEL_FLAGS_avx512 -Wno-maybe-uninitialized -Wno-uninitialized)
endif()

set(AUTOMODEL_CPU_SOURCES csrc/cpu/isa.cpp)
foreach(level IN LISTS AUTOMODEL_CPU_LEVELS)
  list(APPEND AUTOMODEL_CPU_SOURCES csrc/cpu/level_${level}.cpp)
  set_source_files_properties(csrc/cpu/level_${level}.cpp PROPERTIES
                              COMPILE_OPTIONS "${AUTOMODEL_FLAGS_${level}}")
endforeach()

set(AUTOMODEL_CUDA_SOURCES
    csrc/cuda/backward_bf16.cu
    csrc/cuda/backward_fp16.cu
    csrc/cuda/backward_fp32.cu
    csrc/cuda/backward_fp64.cu
    csrc/cuda/join.cu
    csrc/cuda/forward_bf16.cu
    csrc/cuda/forward_fp16.cu
    csrc/cuda/forward_fp32.cu
    csrc/cuda/forward_fp64.cu
    csrc/cuda/launch.cu)

set(AUTOMODEL_OP_SOURCES
    csrc/op/autograd.cpp
    csrc/op/autograd_backward.cpp
    csrc/op/calls.cpp
    csrc/op/checks.cpp
    csrc/op/cpu.cpp
    csrc/op/derivatives.cpp
    csrc/op/meta.cpp
    csrc/op/rows.cpp
    csrc/op/schemas.cpp
    csrc/op/unsupported.cpp)
set(AUTOMODEL_OP_CUDA_SOURCES csrc/op/cuda.cpp)

set(AUTOMODEL_PYTHON_SOURCES csrc/python.cpp)

set(AUTOMODEL_GOLDEN_WRITER_SOURCES tests/cpp/golden_writer.cpp)
set(AUTOMODEL_CUDA_DRIVER_SOURCES tests/cpp/cuda_driver.cpp)
set(AUTOMODEL_CPP_TEST_SOURCES
    tests/cpp/environment_test.cpp
    tests/cpp/golden_test.cpp
    tests/cpp/kernels_test.cpp
    tests/cpp/memory_test.cpp
    tests/cpp/plan_test.cpp
    tests/cpp/tree_test.cpp
    tests/cpp/types_test.cpp)
