#include "runtime/plan_prediction.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace colibri {
namespace {

// Where nothing was measured: attention costs 11 MOP for each row and position, the rest of a row
// 80 GOP at real size.
constexpr int32_t kUsualPositions = 8192;
// Whatever was measured.
constexpr double kLeastPositions = 1024, kMostPositions = 1 << 17;

// So many experts a layer are chosen evenly; after so many doublings they are not.
constexpr double kEvenExperts = 32, kSkewing = 2;

void SetChoices(const ModelConfig& c, SweepModel* m) {
  m->chosen = static_cast<double>(c.top_k) / std::max(1, c.experts);
  m->skew = std::clamp(std::log2(std::max(1, c.experts) / kEvenExperts) / kSkewing, 0.0, 1.0);
}

SweepModel SweepModelOf(const Model& model, const Plan& p) {
  const ModelConfig& c = model.Config();
  SweepModel m;
  double experts = 0;
  for (size_t i = 0; i < model.ExpertClasses().size(); ++i) {
    const Model::ExpertClass& e = model.ExpertClasses()[i];
    const double used = LayerExperts(model, e);
    m.expert_bytes += static_cast<double>(e.slot_bytes) * used;
    experts += used;
    m.slots += used * p.slot_classes[i].count / e.experts;
  }
  m.read_bytes = experts > 0 ? m.expert_bytes / experts : 0;
  m.resident = experts > 0 ? m.slots / experts : 1;
  SetChoices(c, &m);
  m.layers = std::max(1.0, experts / std::max(1, c.experts));
  m.streamed_bytes = static_cast<double>(p.sweep_dense);
  if (p.kv_file > 0) {
    m.position_bytes = static_cast<double>(p.kv_file) / std::max(1, p.kv_pages) / p.page_tokens;
  }
  m.most_positions = model.HasIndexer() ? c.index_top_k : 0;
  return m;
}

std::string BytesText(double bytes) { return SizeText(static_cast<uint64_t>(bytes)); }

}  // namespace

double LayerExperts(const Model& model, const Model::ExpertClass& c) {
  const ModelConfig& config = model.Config();
  if (c.first_layer >= config.layers) return 0;
  return c.last_layer < config.layers ? c.experts
                                      : c.experts - static_cast<uint32_t>(config.experts);
}

double UnionShare(const Model& model, double rows) {
  SweepModel m;
  SetChoices(model.Config(), &m);
  return m.Union(rows);
}

int32_t HeldTokens(const PlanRequest& r, const Plan& p) {
  return r.held_tokens > 0 ? std::min(r.held_tokens, p.context) : p.context / 4;
}

double SecondsARow(const Model& model, const PlanRequest& r, const Plan& p) {
  const SweepRows sweep{p.filled_rows, std::min(p.filled_rows, p.together),
                        static_cast<double>(HeldTokens(r, p))};
  // The experts' part is read into slots, the others are not.
  const uint64_t others = p.kv_sweep_bytes + p.sweep_dense;
  return SweepSeconds(*r.speeds, SweepModelOf(model, p), sweep,
                      static_cast<double>(p.sweep_bytes - others), static_cast<double>(others)) /
         p.filled_rows;
}

int32_t PositionsARow(const PlanRequest& r, const Plan& p) {
  if (!r.speeds || r.speeds->position_s <= 0) return kUsualPositions;
  const double rest = r.speeds->LayersSeconds(p.rows) / p.rows;
  return static_cast<int32_t>(
      std::clamp(rest / r.speeds->position_s, kLeastPositions, kMostPositions));
}

Prediction PredictionOf(const Model& model, const PlanRequest& r, const Plan& p) {
  RunModel run;
  const auto frames = static_cast<uint64_t>(p.frames);
  // Of several frames each has its part of the answers, and they share drive and processor.
  if (r.answers) run.answers = (*r.answers + frames - 1) / frames;
  run.answer = r.answer_mean > 0 ? r.answer_mean : std::max(1, p.context / 4);
  run.prompt = r.prompt_mean > 0 ? r.prompt_mean : run.answer * (r.rows_per_token - 1);
  run.longest = std::max(run.answer, r.answer_longest);
  run.together = std::max(1.0, p.together / p.frames);
  run.rows = p.rows;
  run.prefill_rows = p.prefill_rows;
  return Predict(*r.speeds, SweepModelOf(model, p), run);
}

std::string PredictionText(const Prediction& p) {
  return fmt::format("{:.{}f} tokens/s, {} a token", p.tokens_a_second,
                     p.tokens_a_second < 10 ? 2 : 1, BytesText(p.bytes_a_token));
}

std::string PredictionNote(const Prediction& p) {
  std::string text = fmt::format("tokens, {} read for each", BytesText(p.bytes_a_token));
  if (p.seconds > 0) text += fmt::format("; {:.0f} sweeps, {:.0f} s in all", p.sweeps, p.seconds);
  return text;
}

}  // namespace colibri
