// Runs a fixture folder (the layout of tests/fixtures/README.md) through the reference engine and
// compares every stored tensor. Used by `colibri-bench verify` and by the tests.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/stages.h"
#include "runtime/weights.h"

namespace colibri {

struct FixtureOptions {
  int32_t page_tokens = kDefaultPageTokens;
  // Rows a frame, first to last; the last number repeats. Empty: the whole prompt at once.
  std::vector<int32_t> chunks;
  bool dense = false;           // the fixture's dense.* tensors, by leaving the indexers out
  bool dense_by_top_k = false;  // the same by an index_top_k beyond the prompt
  // Test seams: make a mistake in the opened model, in its dense weights once loaded, or in frames.
  std::function<void(Model&)> change_model;
  StageHook* hook = nullptr;
};

// Values computed by one run, under the names of expected.safetensors. Integers are kept as floats'
// neighbours in `ints`; matrices are row-major.
struct FixtureValues {
  std::map<std::string, std::vector<float>> floats;
  std::map<std::string, std::vector<int32_t>> ints;
};

struct TensorDifference {
  std::string name;
  double largest = 0;    // |difference|, or the count of unequal integers
  double tolerance = 0;  // 0 for integers: equality
  bool passed = false;
};

FixtureValues ComputeFixture(const std::string& directory, const FixtureOptions& options);
// Every expected tensor (dense.* ones when options.dense), in name order.
std::vector<TensorDifference> CompareFixture(const std::string& directory,
                                             const FixtureValues& values,
                                             const FixtureOptions& options);

struct VerifyOptions {
  std::vector<std::string> directories;
  bool json = false;
};
// Prints a table a folder; 1 when a tensor is beyond its tolerance.
int RunVerify(const VerifyOptions& options);

}  // namespace colibri
