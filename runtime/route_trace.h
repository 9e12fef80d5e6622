// A route trace: for every frame and sparse layer the experts its rows chose, and what each way of
// guessing said of them beforehand, so that cache policies and lookahead can be compared without
// the model (`colibri-bench replay`).
//
// Text, one record a line, words separated by one space, in this order (version 1):
//   colibri-routes 1
//   model LAYERS EXPERTS TOP_K
//   layer LAYER BYTES               each sparse layer, ascending: bytes of one of its experts
//   guess FRAME LAYER WAY E E ...   what WAY expected for the next `routed` of FRAME and LAYER, the
//                                   surest first
//   routed FRAME LAYER ROWS E:N ... the union in file order, each expert with its number of rows
// A frame that starts again is routed at a layer that is not after the last one.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/frame.h"
#include "runtime/weights.h"

namespace colibri {

// Ways to guess a layer's experts before it is routed (users' notes C1).
enum class Guess : uint8_t {
  kPrevious,  // those of each sequence's previous token
  kState,     // the layer's router on the state after the attention of the layer before
  kShared,    // the same with the output of the shared expert added
  kInput,     // the layer's router on the layer's input: its attention is skipped
  kCount
};
constexpr size_t kGuesses = static_cast<size_t>(Guess::kCount);
const char* GuessName(Guess way);

struct RouteVisit {
  uint16_t frame = 0, layer = 0;
  uint32_t rows = 0;
  std::vector<uint16_t> experts;  // in file order
  std::vector<uint32_t> chosen;   // rows of each
  std::array<std::vector<uint16_t>, kGuesses> guesses;
  std::array<bool, kGuesses> guessed{};
};

struct RouteTrace {
  int32_t layers = 0, experts = 0, top_k = 0;
  std::vector<uint64_t> expert_bytes;  // [layers]; 0: a dense layer
  std::vector<RouteVisit> visits;
};

// Throws IoError with file, line, what was found and what was expected.
RouteTrace ReadRouteTrace(const std::string& path);

// Experts with votes, most votes first, equal ones in file order.
void OrderByVotes(std::span<const uint32_t> votes, std::vector<uint16_t>* order);
// How many of `order`, from the front, are worth reading before they are asked for. `bytes`: of an
// expert.
size_t SureGuesses(const ModelConfig& config, uint64_t bytes, size_t rows,
                   std::span<const uint32_t> votes, std::span<const uint16_t> order);

// Writes a trace as the frames go. Threads: any; a frame's calls come in its order.
class RouteTraceWriter {
 public:
  // Throws IoError.
  RouteTraceWriter(std::string path, const Model& model);
  ~RouteTraceWriter();
  RouteTraceWriter(const RouteTraceWriter&) = delete;
  RouteTraceWriter& operator=(const RouteTraceWriter&) = delete;

  void Guessed(uint16_t frame, int32_t layer, Guess way, std::span<const uint32_t> votes);
  // `frame` has the jobs and choices of `layer`. Also writes kPrevious.
  void Routed(const Frame& frame, int32_t layer);
  // All is written. Throws IoError. No call may follow.
  void Finish();

 private:
  struct Last {
    uint64_t age = 0;
    int32_t position = -1;
    std::vector<int32_t> experts;
  };
  void WriteGuess(uint16_t frame, int32_t layer, Guess way);
  void Previous(const Frame& frame, int32_t layer);

  const std::string path_;
  const size_t experts_, top_k_;
  std::mutex mutex_;  // guards what follows
  std::FILE* file_ = nullptr;
  std::string line_;
  std::vector<uint32_t> votes_;
  std::vector<uint16_t> order_;
  std::map<std::pair<uint32_t, int32_t>, Last> last_;  // by sequence and layer
};

}  // namespace colibri
