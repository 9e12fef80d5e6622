#include "runtime/merge.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "io/error.h"
#include "io/whole_file.h"
#include "runtime/finished_lines.h"
#include "runtime/line_id.h"
#include "runtime/line_limits.h"
#include "runtime/output_file.h"
#include "runtime/record.h"
#include "runtime/record_reader.h"
#include "runtime/resume.h"
#include "runtime/run_output.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ < 0) throw IoError(fmt::format("{}: {}", path, Reason(errno)));
    struct stat info {};
    if (fstat(fd_, &info) == 0 && S_ISREG(info.st_mode)) return;
    close(fd_);
    throw UsageError(fmt::format("{}: --merge needs a regular file", path));
  }
  ~Descriptor() { close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int Get() const { return fd_; }

 private:
  int fd_;
};

struct Place {
  uint64_t line = 0, line_hash = 0, begin = 0, bytes = 0;
  uint32_t output = 0;
  uint32_t id_and_failed = 0;  // as in FinishedLines: the id's 23 bits, then the failed bit
  bool Failed() const { return (id_and_failed & 1) != 0; }
};

class Merger {
 public:
  Merger(const MergeRequest& request, const std::function<void(std::string_view)>& write)
      : request_(request), write_(write) {}

  MergeReport Run() {
    if (request_.outputs.empty()) throw UsageError("--merge: no outputs are given");
    Open();
    CheckManifests();
    for (uint32_t i = 0; i < files_.size(); ++i) Index(i);
    std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
      return a.line != b.line ? a.line < b.line : a.output < b.output;
    });
    // First everything is checked, so that a refused merge writes nothing.
    WalkInput(false);
    WalkInput(true);
    return std::move(report_);
  }

 private:
  const std::string& Name(uint32_t output) const { return request_.outputs[output]; }

  void Open() {
    std::set<std::pair<dev_t, ino_t>> seen;
    for (const std::string& path : request_.outputs) {
      files_.push_back(std::make_unique<Descriptor>(path));
      const int fd = files_.back()->Get();
      struct stat info {};
      if (fstat(fd, &info) == 0 && !seen.insert({info.st_dev, info.st_ino}).second) {
        throw UsageError(fmt::format("--merge: {} is given twice", path));
      }
      if (flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        throw IoError(fmt::format("{} is being written: merge when its run has ended", path));
      }
    }
  }

  void CheckManifests() {
    for (uint32_t i = 0; i < files_.size(); ++i) {
      const std::string path = ManifestPath(Name(i));
      std::optional<Manifest> manifest = ReadManifest(path);
      if (!manifest) {
        throw UsageError(fmt::format("{} has no manifest: {} is not there", Name(i), path));
      }
      if (i == 0) {
        report_.manifest = std::move(*manifest);
        continue;
      }
      const auto differences =
          CompareManifests(report_.manifest, *manifest, {false, !request_.mixed_targets});
      if (!differences.empty()) {
        std::string text = fmt::format("{} and {} come from different runs", Name(0), Name(i));
        for (const std::string& difference : differences) text += "\n  " + difference;
        throw UsageError(text);
      }
      std::string& target = report_.manifest.simd_target;
      if (target.find(manifest->simd_target) == std::string::npos) {
        target += "+" + manifest->simd_target;
      }
    }
    report_.manifest.shard = {};
    context_ = ContextOf(report_.manifest);
    if (context_ == 0) {
      throw IoError(fmt::format("{}: it has no option ctx-size, which says how long a line may be",
                                ManifestPath(Name(0))));
    }
  }

  void Index(uint32_t output) {
    const RecordsEnd end = ForEachRecord(
        files_[output]->Get(), Name(output),
        [&](const RecordReader::Line& line, const RecordFacts& facts) {
          places_.push_back({facts.line, facts.line_hash, line.begin, line.text.size(), output,
                             FinishedLines::ShortId(facts.id_hash) << 1 | facts.failed});
        });
    if (end.cut_bytes == 0) return;
    report_.notes.push_back(
        fmt::format("{}: a torn end of {} bytes is left out", Name(output), end.cut_bytes));
  }

  void WalkInput(bool write) {
    const Descriptor input(request_.input);
    LineSource source(input.Get(), MaxLineBytes(context_));
    std::optional<InputFormat> format = request_.format;
    std::string text;
    uint64_t number = 0;
    size_t next_place = 0;
    for (;;) {
      const LineSource::Next next = source.TryNext(&text, &number);
      if (next == LineSource::Next::kAgain || next == LineSource::Next::kSkipped) continue;
      if (next == LineSource::Next::kError) throw IoError(source.Error());
      if (next == LineSource::Next::kEnd) break;
      const bool whole = next == LineSource::Next::kLine;
      if (whole && !format) format = FormatFromLine(text);
      if (next_place < places_.size() && places_[next_place].line < number) NotInInput(next_place);
      size_t end = next_place;
      while (end < places_.size() && places_[end].line == number) ++end;
      if (write) {
        Write(next_place, end);
      } else {
        ++report_.lines;
        std::string id;
        if (whole && end > next_place) id = LineCustomId(text, number, *format, context_);
        Check(next_place, end, {number, whole ? HashText(text) : 0, id});
      }
      next_place = end;
    }
    if (next_place < places_.size()) NotInInput(next_place);
  }

  [[noreturn]] void NotInInput(size_t place) const {
    throw UsageError(fmt::format("{} has a record of line {}, which {} does not have",
                                 Name(places_[place].output), places_[place].line, request_.input));
  }

  // The records of one line of the input.
  void Check(size_t begin, size_t end, const SeenLine& seen) {
    if (begin == end) {
      ++report_.missing;
      if (report_.first_missing.size() < kMaxMissing) report_.first_missing.push_back(seen.number);
      return;
    }
    for (size_t i = begin; i < end; ++i) {
      const Place& place = places_[i];
      const FinishedLines::Entry entry{place.line, place.line_hash, place.id_and_failed >> 1,
                                       place.Failed()};
      if (!Matches(entry, seen)) {
        throw UsageError(fmt::format("{}: line {} of {} was changed since it was answered",
                                     Name(place.output), place.line, request_.input));
      }
    }
    ++report_.records;
    if (places_[begin].Failed()) ++report_.failed;
    if (end - begin == 1) return;
    const std::string bytes = LineBytes(Record(begin));
    for (size_t i = begin + 1; i < end; ++i) {
      if (LineBytes(Record(i)) != bytes) {
        throw UsageError(fmt::format("{} and {} answer line {} differently",
                                     Name(places_[begin].output), Name(places_[i].output),
                                     seen.number));
      }
      ++report_.duplicates;
    }
  }

  void Write(size_t begin, size_t end) {
    if (begin == end) return;
    write_(Record(begin));
    write_("\n");
  }

  const std::string& Record(size_t place) {
    const Place& p = places_[place];
    ReadAt(files_[p.output]->Get(), Name(p.output), p.begin, p.bytes, &record_);
    return record_;
  }

  const MergeRequest& request_;
  const std::function<void(std::string_view)>& write_;
  std::vector<std::unique_ptr<Descriptor>> files_;
  std::deque<Place> places_;
  MergeReport report_;
  std::string record_;
  int32_t context_ = 0;  // of the runs, for their limits of lines
};

}  // namespace

std::string MergeReport::MissingText() const {
  if (missing == 0) return {};
  std::string text = fmt::format("{} of {} lines have no record: ", missing, lines);
  for (size_t i = 0; i < first_missing.size(); ++i) {
    text += fmt::format("{}{}", i > 0 ? ", " : "", first_missing[i]);
  }
  if (missing > first_missing.size()) text += ", ...";
  return text;
}

MergeReport MergeOutputs(const MergeRequest& request,
                         const std::function<void(std::string_view)>& write) {
  return Merger(request, write).Run();
}

MergeReport MergeIntoFile(const MergeRequest& request, const std::string& path, bool overwrite) {
  const auto refuse_if_written = [&path](const std::string& read) {
    struct stat info {};
    if (stat(read.c_str(), &info) != 0) return;  // whoever opens it says so
    if (const std::string name = NameWritten(path, info); !name.empty()) {
      throw UsageError(fmt::format("--merge: {} is to be read and written", name));
    }
  };
  refuse_if_written(request.input);
  for (const std::string& output : request.outputs) {
    refuse_if_written(output);
    refuse_if_written(ManifestPath(output));
  }
  // Locked, so that no run appends to what is replaced.
  OutputFile old(path);
  if (!old.Regular()) {
    return MergeOutputs(request, [&](std::string_view bytes) { WriteAll(old.Fd(), bytes, path); });
  }
  if (old.Size() > 0 && !overwrite) {
    throw UsageError(fmt::format("{} exists and is not empty: --overwrite replaces it", path));
  }
  MergeReport report;
  try {
    old.Replace([&](const OutputFile::Append& append) { report = MergeOutputs(request, append); },
                // What has records has a manifest.
                [&] { WriteManifest(ManifestPath(path), report.manifest); });
  } catch (...) {
    old.Discard();
    throw;
  }
  return report;
}

}  // namespace colibri
