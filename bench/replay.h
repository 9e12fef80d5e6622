// `colibri-bench replay`: what cache policies and ways of guessing would have made of a recorded
// route trace (runtime/route_trace.h), without the model. The policies are the engine's own code;
// belady, which knows the future, is the bound of any.
// Threads: one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/table.h"
#include "io/cache_policy.h"
#include "runtime/route_trace.h"

namespace colibri {

struct ReplayOptions {
  std::string trace;
  std::vector<std::string> slots = {"5%", "10%", "25%", "50%"};  // N or N% of each class
  std::vector<std::string> policies;                             // empty: all, and belady
  std::string usage;     // counts of earlier runs (runtime/usage_file.h); "": none
  bool guesses = false;  // the table of guesses instead of that of policies
  TableFormat format = TableFormat::kText;
};

struct ReplayFigures {
  uint64_t asked = 0, hits = 0;
  uint64_t asked_bytes = 0, read_bytes = 0;
};

// `slots` of each class (experts of one size), at most its experts; `heat` as in PolicyItems, by
// ReplayItem. nullopt: belady.
ReplayFigures ReplayPolicy(const RouteTrace& trace, std::optional<CachePolicyKind> policy,
                           double slots, bool percent, const std::vector<float>& heat);
// Items of a trace are numbered layer by layer, dense layers included.
inline uint32_t ReplayItem(const RouteTrace& trace, uint16_t layer, uint16_t expert) {
  return uint32_t{layer} * static_cast<uint32_t>(trace.experts) + expert;
}

struct GuessFigures {
  uint64_t visits = 0;   // with a guess
  uint64_t guessed = 0;  // experts
  uint64_t right = 0, wanted = 0;
  double Recall() const {
    return wanted == 0 ? 0 : static_cast<double>(right) / static_cast<double>(wanted);
  }
  double WrongPerRight() const {
    return right == 0 ? 0 : static_cast<double>(guessed - right) / static_cast<double>(right);
  }
};
// Every visit but those of a frame's first sweep, which nothing could have guessed for some ways;
// `first_layer` only: the first sparse layer, which no router can be asked about early.
GuessFigures ReplayGuess(const RouteTrace& trace, Guess way, bool first_layer);
// The first sparse layer, guessed to choose what it chose in the sweep before.
GuessFigures ReplayWrap(const RouteTrace& trace);

// Prints; returns 0. Throws UsageError, IoError.
int RunReplay(const ReplayOptions& options);

}  // namespace colibri
