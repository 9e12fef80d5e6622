// The router's choice for one row, and the union of a frame's choices (model spec 3.6).
// Threads: pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config.h"

namespace colibri {

// From the router's logits [experts]: the top_k experts, best choice first (equal choices: lower
// id), and their final weights. `choice` is scratch [experts]. Choosing uses sigmoid + bias, the
// weights the plain sigmoid: biases are 12 to 35 in real models, where (s + b) - b is 0.
// Groups: a group scores the sum of its two largest choices; equal scores: lower group.
void ChooseExperts(const ModelConfig& config, std::span<const float> logits,
                   std::span<const float> bias, std::span<float> choice, std::span<int32_t> experts,
                   std::span<float> weights);

// The weights of chosen experts from their sigmoids: renormalised and scaled as the config says.
void FinalWeights(const ModelConfig& config, std::span<float> sigmoids);

}  // namespace colibri
