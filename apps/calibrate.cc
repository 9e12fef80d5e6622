#include "apps/calibrate.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <random>

#include "apps/measure.h"
#include "apps/say.h"
#include "apps/setup.h"
#include "bench/bench_readers.h"
#include "io/error.h"
#include "kernels/kernels.h"
#include "runtime/fingerprint.h"
#include "runtime/speeds_file.h"

namespace colibri {
namespace {

// Drives answer evenly within such a time; one that is shared does not in any.
constexpr double kDriveSeconds = 0.7;
constexpr uint64_t kLeastReads = 8;  // in that time
// Small models are read again and again until the time has gone by, or so many bytes.
constexpr uint64_t kMostRead = uint64_t{8} << 30;
// While measuring: a part of the budget, within it beside the process as it is, and no more than
// some experts of the real model need. Of that, to read into.
constexpr uint64_t kMostMemory = 768'000'000;
constexpr uint64_t kBudgetPart = 4;
constexpr uint64_t kMostReadInto = uint64_t{1} << 28;

uint64_t BudgetOf(const PlanRequest& r) {
  return r.ram ? *r.ram : AvailableMemory().bytes + ResidentBytes();
}

// Bytes that may be taken now. The budget's margin stays free, as it does for the plan.
uint64_t Room(const PlanRequest& r) {
  const uint64_t budget = BudgetOf(r), kept = MarginOf(budget) + ProcessBytes(r.threads);
  return std::min({kMostMemory, budget / kBudgetPart, budget - std::min(budget, kept)});
}

// All that the rate of the drive depends on.
std::string DriveName(const RunOptions& o, const Model& model, const std::string& fingerprint) {
  std::string name = fingerprint;
  for (const std::string& directory : model.Files().Directories()) {
    struct stat info {};
    const bool known = stat(directory.c_str(), &info) == 0;
    name += fmt::format(" {} on {}", std::filesystem::weakly_canonical(directory).string(),
                        known ? info.st_dev : 0);
  }
  return name +
         fmt::format(" io {} depth {} limit {}", static_cast<int>(o.io), o.io_depth, o.io_limit);
}

// All that computing depends on.
std::string ComputingName(const RunOptions& o, int32_t threads, const std::string& fingerprint) {
  return fmt::format("{} {} threads {} activations {} kv {} attention {} rows {}", fingerprint,
                     threads, SimdTarget(), o.f32_activations ? "f32" : "auto",
                     o.f32_kv ? "f32" : "bf16", o.dense_attention ? "dense" : "auto", o.max_rows);
}

double MeasureDrive(const RunOptions& o, const PlanRequest& request) {
  Model model(o.model);
  std::vector<uint32_t> items;
  uint64_t bytes = 0, widest = 0;
  for (uint32_t i = 0; i < model.ExpertCount(); ++i) {
    if (model.ExpertLayer(i) >= model.Config().layers) continue;
    items.push_back(i);
    bytes += model.Expert(i).slot_bytes;
    widest = std::max(widest, model.Expert(i).slot_bytes);
  }
  if (items.empty()) throw IoError("the model has no experts to read");
  // Under a low limit that would take for ever, and it is the limit that would be measured.
  if (o.io_limit > 0 &&
      static_cast<double>(o.io_limit) * kDriveSeconds < static_cast<double>(kLeastReads * widest)) {
    return static_cast<double>(o.io_limit);
  }
  std::mt19937 random(1);
  std::shuffle(items.begin(), items.end(), random);
  const size_t once = items.size();
  for (uint64_t rounds = std::min<uint64_t>(1000, kMostRead / bytes); rounds > 1; --rounds) {
    items.insert(items.end(), items.begin(), items.begin() + static_cast<ptrdiff_t>(once));
  }
  Plan streaming;  // past the page cache where that can be had
  streaming.expert_total = 1;
  EngineOptions unused;
  OpenFiles(o, streaming, model, &unused);
  const uint64_t memory = std::min(kMostReadInto, Room(request));
  if (memory < widest) throw IoError("too little memory to measure how fast the drive is");
  const double rate = RawReadRate(
      model, [&] { return OpenReader(o, model); }, items, kDriveSeconds, memory);
  if (rate <= 0) throw IoError("an expert cannot be read");
  return rate;
}

void Remember(const std::string& path, const std::string& drive, const std::string& computing,
              const RememberedSpeeds& measured) {
  if (path.empty() || (!measured.drive && !measured.computing)) return;
  try {
    RememberSpeeds(path, drive, computing, measured);
  } catch (const IoError&) {
    // Measured, not remembered: the next run measures again.
  }
}

Speeds Measured(const RunOptions& o, const Model& model, const Tokenizer& tokenizer,
                const PlanRequest& request) {
  const std::string path = SpeedsPath();
  const std::string fingerprint = ModelFingerprint(model.Files());
  const std::string drive = DriveName(o, model, fingerprint);
  const std::string computing = ComputingName(o, request.threads, fingerprint);
  RememberedSpeeds known, measured;
  if (!o.calibrate) known = ReadSpeeds(path, drive, computing);
  if (o.drive_speed > 0) known.drive = static_cast<double>(o.drive_speed);
  if (!known.drive) known.drive = measured.drive = MeasureDrive(o, request);
  if (!known.computing) {
    ComputeRequest compute;
    compute.model = o.model;
    compute.threads = request.threads;
    compute.f32_activations = o.f32_activations;
    compute.dense_attention = o.dense_attention;
    compute.kv_type = request.kv_type;
    compute.most_rows = o.max_rows;
    compute.memory = Room(request);
    known.computing = measured.computing = MeasureComputing(compute, tokenizer);
  }
  Remember(path, drive, computing, measured);
  if (o.calibrate) {
    Say(fmt::format("calibration: experts are read at {}/s; peak memory {} of {}",
                    SizeText(static_cast<uint64_t>(*known.drive)), SizeText(PeakResidentBytes()),
                    SizeText(BudgetOf(request))));
  }
  Speeds speeds = *known.computing;
  speeds.drive = *known.drive;
  return speeds;
}

}  // namespace

std::optional<Speeds> SpeedsOf(const RunOptions& o, const Model& model, const Tokenizer& tokenizer,
                               const PlanRequest& request) {
  if (o.no_prediction) return std::nullopt;
  try {
    return Measured(o, model, tokenizer, request);
  } catch (const std::exception& e) {
    Say(fmt::format("no prediction: {}", e.what()));
    return std::nullopt;
  }
}

}  // namespace colibri
