#include "apps/usage.h"

#include <fmt/format.h>

#include "apps/say.h"
#include "io/error.h"

namespace colibri {

UsageCounts::UsageCounts(const RunOptions& options, const Model& model) : model_(model) {
  if (options.usage == "off") return;
  const bool own = options.usage == "auto";
  const std::string path = own ? options.model.front() + "/" + kUsageName : options.usage;
  try {
    before_ = ReadUsage(path, model.Config().layers, model.Config().experts);
    // A folder of the user's gets no file that was not there, unless it is named.
    if (before_ || !own) path_ = path;
  } catch (const IoError& e) {
    Say(fmt::format("{}; the run goes on without these counts", e.what()));
  }
}

std::vector<float> UsageCounts::Heat(int32_t rows) const {
  if (!before_) return {};
  const std::vector<float> heat = HeatOf(*before_, model_.Config().top_k, rows);
  std::vector<float> by_item(model_.ExpertCount());
  for (uint32_t item = 0; item < by_item.size(); ++item) {
    const int32_t layer = model_.ExpertLayer(item);
    const auto expert = static_cast<size_t>(item - model_.ExpertItem(layer, 0));
    const auto experts = static_cast<size_t>(before_->experts);
    by_item[item] = heat[static_cast<size_t>(layer) * experts + expert];
  }
  return by_item;
}

void UsageCounts::Save(const Engine& engine) {
  if (path_.empty()) return;
  ExpertUsage usage =
      before_ ? *before_ : ExpertUsage(model_.Config().layers, model_.Config().experts);
  const std::vector<uint64_t> chosen = engine.Chosen();
  for (uint32_t item = 0; item < chosen.size(); ++item) {
    const int32_t layer = model_.ExpertLayer(item);
    usage.At(layer, static_cast<int32_t>(item - model_.ExpertItem(layer, 0))) += chosen[item];
  }
  try {
    WriteUsage(path_, usage);
  } catch (const IoError& e) {
    Say(fmt::format("{}: the counts of chosen experts are not kept", e.what()));
  }
}

}  // namespace colibri
