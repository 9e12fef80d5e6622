// What the planner makes of known speeds: what a row costs, how much attention a prompt's rows may
// take, what the run will be like. Threads: pure.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/plan.h"
#include "runtime/prediction.h"

namespace colibri {

// Of a class, those of the model's layers: not of the MTP layer, which sweeps do not ask for.
double LayerExperts(const Model& model, const Model::ExpertClass& c);

// The share of a layer's experts that so many rows choose.
double UnionShare(const Model& model, double rows);

// Positions that an answer holds, and so attends to, on average.
int32_t HeldTokens(const PlanRequest& request, const Plan& plan);

// The expected full sweep's seconds over its rows. Speeds are known.
double SecondsARow(const Model& model, const PlanRequest& request, const Plan& plan);

// With so many positions a row's attention takes as long as the rest of it.
int32_t PositionsARow(const PlanRequest& request, const Plan& plan);

// Speeds are known.
Prediction PredictionOf(const Model& model, const PlanRequest& request, const Plan& plan);

// "4.52 tokens/s, 1.42 GB a token".
std::string PredictionText(const Prediction& prediction);
// "tokens, 1.42 GB read for each; 140 sweeps, 12,345 s in all".
std::string PredictionNote(const Prediction& prediction);

}  // namespace colibri
