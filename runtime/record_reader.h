// Reading records back: their key facts, and the lines of an output file as a stream. For resuming,
// sorting and merging; no model needed. Holds one line at a time. Threads: one at a time a reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace colibri {

struct RecordFacts {
  uint64_t line = 0;       // of the input, from 1
  uint64_t line_hash = 0;  // HashText of the input line
  uint64_t id_hash = 0;    // HashText of custom_id; of "" when it is null
  bool failed = false;     // status other than 200
};

// nullopt: not one whole record of colibri-run (no JSON object, broken UTF-8, a key missing, twice
// or of the wrong type). White space around it is let be.
std::optional<RecordFacts> ReadRecordFacts(std::string_view record);

// Reads `bytes` at `begin` into `*record`. Throws IoError, also for a file that ends before.
void ReadAt(int fd, const std::string& path, uint64_t begin, uint64_t bytes, std::string* record);

class RecordReader {
 public:
  struct Line {
    std::string_view text;  // without line feed; valid until the next call
    uint64_t number = 0;    // in the file, from 1
    uint64_t begin = 0;     // offset in the file
    uint64_t end = 0;       // offset behind the line feed, if it has one
    bool terminated = false;
    bool zeros = false;  // holds a NUL byte, as no record does; `text` is then empty
  };

  // Reads `fd` with pread from the beginning; its offset stays. `path` is for messages.
  RecordReader(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  // False at the end. Throws IoError.
  bool Next(Line* line);

 private:
  bool Fill();

  int fd_;
  std::string path_;
  std::string buffer_;
  size_t begin_ = 0;        // of the line at hand in buffer_
  uint64_t buffer_at_ = 0;  // offset of buffer_[0] in the file
  uint64_t number_ = 0;
};

// What stands behind the last record.
struct RecordsEnd {
  uint64_t whole_bytes = 0;   // up to the last record's end
  uint64_t cut_bytes = 0;     // a record torn by a crash, zeros after a power cut
  bool missing_feed = false;  // the last record lacks its line feed
};

// Gives every record of an output to `visit`. A crash leaves an end that is no record: one last
// line, and before it lines with NUL bytes. Any other line that is no record is damage: throws
// IoError with its number.
RecordsEnd ForEachRecord(
    int fd, const std::string& path,
    const std::function<void(const RecordReader::Line&, const RecordFacts&)>& visit);

}  // namespace colibri
