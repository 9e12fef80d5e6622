// The choice of one token from logits, and log probabilities (design: sampling contract).
// A draw depends on the logits, the settings, the seed, the custom_id, the number of the choice and
// the position in the completion, on nothing else: not on the batch, the order of lines, drafts or
// a restart. Threads: pure functions; a SampleScratch belongs to one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/request.h"

namespace colibri {

class Tokenizer;

// Which ids may be drawn: those the tokenizer has. Embedding tables are padded beyond them.
class VocabMask {
 public:
  VocabMask(const Tokenizer& tokenizer, int32_t vocab);
  // allowed[id] != 0: may be drawn.
  explicit VocabMask(std::vector<uint8_t> allowed);

  bool Allows(size_t id) const { return allowed_[id] != 0; }
  size_t Size() const { return allowed_.size(); }

 private:
  std::vector<uint8_t> allowed_;
};

// Working memory of Sample; grows to the vocabulary once and is reused.
struct SampleScratch {
  struct Entry {
    float logit = 0;
    int32_t id = 0;
  };
  std::vector<Entry> gathered;
  std::vector<Entry> kept;
};

// The uniform number in [0, 1) of one draw: (XXH3-64(bytes) >> 11) * 2^-53. The bytes, all integers
// little-endian and 8 wide: seed, length of custom_id, custom_id itself, choice, position.
double DrawUniform(uint64_t seed, std::string_view custom_id, int32_t choice, int64_t position);

// The token that the number `u` in [0, 1) draws. logits: [vocab], vocab == mask.Size().
// Temperature 0 takes the highest logit, of equal ones the lowest id. Otherwise token i weighs
// w_i = exp((l_i - l_max) / temperature), in double, and steps shorten the list of allowed tokens
// in the order (logit descending, id ascending): top-k to k tokens; top-p to the shortest prefix
// whose sum reaches top_p * Z, Z the sum over all allowed ids in ascending order of ids; min-p to
// those with w_i >= min_p. Drawn is the first of the list whose running sum exceeds u times the
// list's sum. Returns -1 when an allowed logit is not finite or no id is allowed.
int32_t PickToken(std::span<const float> logits, const Sampling& sampling, double u,
                  const VocabMask& mask, SampleScratch* scratch);

// PickToken with the draw's own number. position counts the completion's tokens from 0.
int32_t Sample(std::span<const float> logits, const Sampling& sampling, std::string_view custom_id,
               int32_t choice, int64_t position, const VocabMask& mask, SampleScratch* scratch);

// log softmax of the raw logits (temperature 1) over the allowed ids, for `id` and for the `top`
// best ones (higher logit, then lower id, first). NaN when a logit is not finite.
TokenLogprob LogprobOf(std::span<const float> logits, int32_t id, int32_t top,
                       const VocabMask& mask);

}  // namespace colibri
