#include "runtime/record_reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "io/error.h"
#include "runtime/text_hash.h"

namespace colibri {
namespace {

constexpr size_t kChunk = size_t{1} << 20;

// Takes the facts from the events of the parser: no tree is built, so that a record with the log
// probabilities of 100,000 tokens costs its text and no more. Events return false to give up.
class FactsHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  RecordFacts facts;
  bool Complete() const { return seen_ == (kLine | kHash | kId | kStatus); }

  bool null() override { return field_ == kId ? Take(kId, HashText("")) : Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }  // negative ones
  bool number_unsigned(number_unsigned_t value) override {
    if (field_ == kLine) return value > 0 && Take(kLine, value);
    if (field_ == kStatus) return Take(kStatus, value);
    return Other();
  }
  bool number_float(number_float_t, const string_t&) override { return Other(); }
  bool string(string_t& value) override {
    if (field_ == kId) return Take(kId, HashText(value));
    if (field_ != kHash) return Other();
    const std::optional<uint64_t> hash = FromHex(value);
    return hash && Take(kHash, *hash);
  }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override {
    if (field_ != kNone) return false;
    if (depth_ == 1) in_response_ = response_next_;
    ++depth_;
    return true;
  }
  bool key(string_t& name) override {
    field_ = kNone;
    response_next_ = false;
    if (depth_ == 1) {
      if (name == "line") field_ = kLine;
      if (name == "line_hash") field_ = kHash;
      if (name == "custom_id") field_ = kId;
      response_next_ = name == "response";
    } else if (depth_ == 2 && in_response_ && name == "status_code") {
      field_ = kStatus;
    }
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_response_ = false;
    return true;
  }
  // An array at the top has depth 0 and is no record.
  bool start_array(std::size_t) override {
    if (field_ != kNone || depth_ == 0) return false;
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  enum Field : unsigned { kNone = 0, kLine = 1, kHash = 2, kId = 4, kStatus = 8 };

  // A value of no interest; false where one of interest has the wrong type, or at the top.
  bool Other() const { return field_ == kNone && depth_ > 0; }
  bool Take(Field field, uint64_t value) {
    if ((seen_ & field) != 0) return false;
    seen_ |= field;
    field_ = kNone;
    if (field == kLine) facts.line = value;
    if (field == kHash) facts.line_hash = value;
    if (field == kId) facts.id_hash = value;
    if (field == kStatus) facts.failed = value != 200;
    return true;
  }

  Field field_ = kNone;
  unsigned seen_ = 0;
  int depth_ = 0;
  bool response_next_ = false, in_response_ = false;
};

}  // namespace

std::optional<RecordFacts> ReadRecordFacts(std::string_view record) {
  FactsHandler handler;
  if (!nlohmann::json::sax_parse(record.begin(), record.end(), &handler)) return {};
  if (!handler.Complete()) return {};
  return handler.facts;
}

void ReadAt(int fd, const std::string& path, uint64_t begin, uint64_t bytes, std::string* record) {
  record->resize(static_cast<size_t>(bytes));
  for (size_t done = 0; done < record->size();) {
    const ssize_t got =
        pread(fd, record->data() + done, record->size() - done, static_cast<off_t>(begin + done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0 || errno != EINTR) {
      throw IoError(fmt::format("reading {} failed: {}", path,
                                got == 0 ? "it became shorter" : std::strerror(errno)));
    }
  }
}

bool RecordReader::Fill() {
  buffer_.erase(0, begin_);
  buffer_at_ += begin_;
  begin_ = 0;
  const size_t old = buffer_.size();
  buffer_.resize(old + kChunk);
  ssize_t got;
  do {
    got = pread(fd_, buffer_.data() + old, kChunk, static_cast<off_t>(buffer_at_ + old));
  } while (got < 0 && errno == EINTR);
  const int error = errno;
  buffer_.resize(old + static_cast<size_t>(got > 0 ? got : 0));
  if (got < 0) throw IoError(fmt::format("reading {} failed: {}", path_, std::strerror(error)));
  return got > 0;
}

bool RecordReader::Next(Line* line) {
  *line = Line{};
  line->begin = buffer_at_ + begin_;
  size_t scanned = begin_;  // no line feed before it
  for (;;) {
    const size_t feed = buffer_.find('\n', scanned);
    const size_t stop = feed == std::string::npos ? buffer_.size() : feed;
    if (std::memchr(buffer_.data() + scanned, 0, stop - scanned) != nullptr) line->zeros = true;
    if (feed != std::string::npos) {
      line->terminated = true;
      if (!line->zeros) line->text = std::string_view(buffer_).substr(begin_, feed - begin_);
      begin_ = feed + 1;
      break;
    }
    // A hole of the size of the drive must not be held in memory.
    if (line->zeros) begin_ = stop;
    scanned = stop - begin_;
    if (!Fill()) {
      if (!line->zeros) line->text = std::string_view(buffer_).substr(begin_);
      begin_ = buffer_.size();
      break;
    }
  }
  line->end = buffer_at_ + begin_;
  if (line->end == line->begin) return false;
  line->number = ++number_;
  return true;
}

RecordsEnd ForEachRecord(
    int fd, const std::string& path,
    const std::function<void(const RecordReader::Line&, const RecordFacts&)>& visit) {
  RecordsEnd end;
  RecordReader reader(fd, path);
  RecordReader::Line line, damaged;
  while (reader.Next(&line)) {
    const std::optional<RecordFacts> facts = line.zeros ? std::nullopt : ReadRecordFacts(line.text);
    // Only a machine that lost its power leaves several damaged lines, and then with zeros.
    if (damaged.number > 0 && (facts || !damaged.zeros)) {
      throw IoError(fmt::format(
          "{}: line {} is no record of colibri-run, but lines follow it: it was damaged "
          "or edited; remove that line to go on",
          path, damaged.number));
    }
    if (facts) {
      visit(line, *facts);
      end.whole_bytes = line.end;
      end.missing_feed = !line.terminated;
    } else {
      damaged = line;
    }
  }
  end.cut_bytes = line.end - end.whole_bytes;
  return end;
}

}  // namespace colibri
