#include "runtime/route_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

#include "io/error.h"
#include "runtime/sequence.h"

namespace colibri {
namespace {

constexpr std::string_view kFirstLine = "colibri-routes 1";

// The words of one line, taken in turn; every complaint names file, line, found and expected.
class Words {
 public:
  Words(const std::string& path, uint64_t number, std::string_view text)
      : path_(path), number_(number), text_(text), rest_(text) {}

  bool End() const { return rest_.empty(); }
  std::string_view Word() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return word;
  }
  uint64_t Number(uint64_t least, uint64_t most, const char* what) {
    return ParseNumber(Word(), least, most, what);
  }
  uint64_t ParseNumber(std::string_view word, uint64_t least, uint64_t most, const char* what) {
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || value < least || value > most) {
      Fail(word, fmt::format("{} ({} to {})", what, least, most));
    }
    return value;
  }
  [[noreturn]] void Fail(std::string_view found, const std::string& expected) const {
    throw IoError(fmt::format("{}: line {}: found \"{}\", expected {}", path_, number_,
                              found.empty() ? text_.substr(0, 60) : found.substr(0, 60), expected));
  }

 private:
  const std::string& path_;
  const uint64_t number_;
  const std::string_view text_;
  std::string_view rest_;
};

struct Parser {
  RouteTrace trace;
  std::map<std::pair<uint16_t, uint16_t>, RouteVisit> pending;  // guesses, by frame and layer

  uint16_t Layer(Words& words) const {
    const auto layer =
        static_cast<uint16_t>(words.Number(0, static_cast<uint64_t>(trace.layers) - 1, "a layer"));
    return layer;
  }
  RouteVisit& Pending(Words& words) {
    const auto frame = static_cast<uint16_t>(words.Number(0, 65535, "a frame"));
    const uint16_t layer = Layer(words);
    if (trace.expert_bytes[layer] == 0) {
      words.Fail(fmt::format("layer {}", layer), "a layer with experts");
    }
    RouteVisit& visit = pending[{frame, layer}];
    visit.frame = frame;
    visit.layer = layer;
    return visit;
  }
  uint16_t Expert(Words& words, std::string_view word) const {
    return static_cast<uint16_t>(
        words.ParseNumber(word, 0, static_cast<uint64_t>(trace.experts) - 1, "an expert"));
  }

  void ModelLine(Words& words) {
    trace.layers = static_cast<int32_t>(words.Number(1, 65535, "a number of layers"));
    trace.experts = static_cast<int32_t>(words.Number(1, 65535, "a number of experts"));
    trace.top_k = static_cast<int32_t>(
        words.Number(1, static_cast<uint64_t>(trace.experts), "experts of a token"));
    trace.expert_bytes.assign(static_cast<size_t>(trace.layers), 0);
  }
  void LayerLine(Words& words) {
    const uint16_t layer = Layer(words);
    trace.expert_bytes[layer] = words.Number(1, uint64_t{1} << 40, "bytes of an expert");
  }
  void GuessLine(Words& words) {
    RouteVisit& visit = Pending(words);
    const std::string_view name = words.Word();
    size_t way = 0;
    while (way < kGuesses && name != GuessName(static_cast<Guess>(way))) ++way;
    if (way == kGuesses) words.Fail(name, "previous, state, shared or input");
    visit.guessed[way] = true;
    visit.guesses[way].clear();
    while (!words.End()) visit.guesses[way].push_back(Expert(words, words.Word()));
  }
  void RoutedLine(Words& words) {
    RouteVisit& visit = Pending(words);
    visit.rows = static_cast<uint32_t>(words.Number(1, 1u << 31, "a number of rows"));
    std::vector<bool> seen(static_cast<size_t>(trace.experts));
    while (!words.End()) {
      const std::string_view word = words.Word();
      const size_t colon = word.find(':');
      if (colon == std::string_view::npos) words.Fail(word, "EXPERT:ROWS");
      const uint16_t expert = Expert(words, word.substr(0, colon));
      if (seen[expert]) words.Fail(word, "each expert once");
      seen[expert] = true;
      visit.experts.push_back(expert);
      visit.chosen.push_back(static_cast<uint32_t>(
          words.ParseNumber(word.substr(colon + 1), 1, visit.rows, "rows of an expert")));
    }
    const auto key = std::pair{visit.frame, visit.layer};
    trace.visits.push_back(std::move(visit));
    pending.erase(key);
  }
};

}  // namespace

const char* GuessName(Guess way) {
  static constexpr const char* kNames[] = {"previous", "state", "shared", "input"};
  return kNames[static_cast<size_t>(way)];
}

RouteTrace ReadRouteTrace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  Parser parser;
  std::string text;
  uint64_t number = 0;
  while (std::getline(file, text)) {
    ++number;
    Words words(path, number, text);
    // A line without its end was cut by whatever ended the recorder.
    if (file.eof()) words.Fail("", "a line end");
    if (number == 1) {
      if (text != kFirstLine) words.Fail("", fmt::format("\"{}\"", kFirstLine));
      continue;
    }
    const std::string_view kind = words.Word();
    if ((kind == "model") != (number == 2)) words.Fail(kind, "`model` as second line only");
    if (kind == "model") {
      parser.ModelLine(words);
    } else if (kind == "layer") {
      parser.LayerLine(words);
    } else if (kind == "guess") {
      parser.GuessLine(words);
    } else if (kind == "routed") {
      parser.RoutedLine(words);
    } else {
      words.Fail(kind, "layer, guess or routed");
    }
    if (!words.End()) words.Fail(words.Word(), "the end of the line");
  }
  if (file.bad()) throw IoError(fmt::format("{}: reading failed", path));
  if (parser.trace.visits.empty()) {
    throw IoError(fmt::format("{}: {} lines, expected at least one `routed`", path, number));
  }
  return std::move(parser.trace);
}

void OrderByVotes(std::span<const uint32_t> votes, std::vector<uint16_t>* order) {
  order->clear();
  for (size_t e = 0; e < votes.size(); ++e) {
    if (votes[e] > 0) order->push_back(static_cast<uint16_t>(e));
  }
  std::sort(order->begin(), order->end(), [&](uint16_t a, uint16_t b) {
    return votes[a] != votes[b] ? votes[a] > votes[b] : a < b;
  });
}

// Below a MiB, one read of the reader's, an expert costs the drive its latency rather than its
// bytes: with those of the demo, 80 kB, leaving unsure ones unread took 8 % of the tokens/s (24
// pairs).
constexpr uint64_t kLargeExpert = 1 << 20;

// A row gives k votes to its first choice, 1 to its last: up to k may be one row's alone. Where
// rows choose more often than a layer has experts there is always something else to compute, and
// such guesses are read for nothing too often: with 256 rows and k = 8 they came true for 63 (1
// vote), 77 (3), 88 (5) and 92 (8) of 100, for 98 of the others, and were 86 % of all that nobody
// used.
size_t SureGuesses(const ModelConfig& config, uint64_t bytes, size_t rows,
                   std::span<const uint32_t> votes, std::span<const uint16_t> order) {
  size_t sure = order.size();
  const bool narrow =
      rows * static_cast<size_t>(config.top_k) < static_cast<size_t>(config.experts);
  if (narrow || bytes < kLargeExpert) return sure;
  while (sure > 0 && votes[order[sure - 1]] <= static_cast<uint32_t>(config.top_k)) --sure;
  return sure;
}

RouteTraceWriter::RouteTraceWriter(std::string path, const Model& model)
    : path_(std::move(path)),
      experts_(static_cast<size_t>(model.Config().experts)),
      top_k_(static_cast<size_t>(model.Config().top_k)),
      file_(std::fopen(path_.c_str(), "we")),
      votes_(experts_) {
  if (file_ == nullptr) throw IoError(fmt::format("{}: {}", path_, std::strerror(errno)));
  const ModelConfig& c = model.Config();
  fmt::print(file_, "{}\nmodel {} {} {}\n", kFirstLine, c.layers, c.experts, c.top_k);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    if (!c.Sparse(layer)) continue;
    fmt::print(file_, "layer {} {}\n", layer, model.Expert(model.ExpertItem(layer, 0)).slot_bytes);
  }
}

RouteTraceWriter::~RouteTraceWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

void RouteTraceWriter::WriteGuess(uint16_t frame, int32_t layer, Guess way) {
  line_.clear();
  auto out = std::back_inserter(line_);
  fmt::format_to(out, "guess {} {} {}", frame, layer, GuessName(way));
  for (const uint16_t e : order_) fmt::format_to(out, " {}", e);
  line_ += '\n';
  std::fwrite(line_.data(), 1, line_.size(), file_);
}

void RouteTraceWriter::Guessed(uint16_t frame, int32_t layer, Guess way,
                               std::span<const uint32_t> votes) {
  const std::lock_guard lock(mutex_);
  OrderByVotes(votes, &order_);
  WriteGuess(frame, layer, way);
}

// The choices of each sequence's last row, if its rows in this frame follow it.
void RouteTraceWriter::Previous(const Frame& frame, int32_t layer) {
  std::fill(votes_.begin(), votes_.end(), 0);
  bool any = false;
  for (const FrameSequence& fs : frame.sequences) {
    if (fs.sequence == nullptr || fs.rows == 0) continue;
    const auto first = static_cast<size_t>(fs.first_row);
    const size_t row = first + static_cast<size_t>(fs.rows) - 1;
    Last& last = last_[{fs.sequence->index, layer}];
    if (last.age == fs.sequence->age && last.position + 1 == frame.rows[first].position) {
      any |= !last.experts.empty();
      for (const int32_t e : last.experts) ++votes_[static_cast<size_t>(e)];
    }
    last.age = fs.sequence->age;
    last.position = frame.rows[row].position;
    last.experts.clear();
    if (frame.rows[row].state != RowState::kLive) continue;
    const auto begin = frame.experts.begin() + static_cast<std::ptrdiff_t>(row * top_k_);
    last.experts.assign(begin, begin + static_cast<std::ptrdiff_t>(top_k_));
  }
  if (!any) return;
  OrderByVotes(votes_, &order_);
  WriteGuess(frame.id, layer, Guess::kPrevious);
}

void RouteTraceWriter::Routed(const Frame& frame, int32_t layer) {
  if (frame.jobs.empty()) return;
  const std::lock_guard lock(mutex_);
  Previous(frame, layer);
  line_.clear();
  auto out = std::back_inserter(line_);
  fmt::format_to(out, "routed {} {} {}", frame.id, layer, frame.Rows());
  for (const FrameJob& job : frame.jobs) fmt::format_to(out, " {}:{}", job.expert, job.count);
  line_ += '\n';
  std::fwrite(line_.data(), 1, line_.size(), file_);
}

void RouteTraceWriter::Finish() {
  const std::lock_guard lock(mutex_);
  const bool failed = std::ferror(file_) != 0;
  if (std::fclose(std::exchange(file_, nullptr)) != 0 || failed) {
    throw IoError(
        fmt::format("{}: writing the route trace failed: {}", path_, std::strerror(errno)));
  }
}

}  // namespace colibri
