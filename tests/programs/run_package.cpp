// run_package LIBRARY PACKAGE INPUTS OUTPUTS: runs an AOTInductor package that holds the op.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "program.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  program::open_library(argv[1]);
  torch::inductor::AOTIModelPackageLoader package(argv[2]);
  program::save(argv[4], package.run(program::load(argv[3])));
}
