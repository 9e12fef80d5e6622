// Records as tests of resuming, sorting and merging need them, and a drive that is full.
#pragma once

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>

#include "runtime/manifest.h"
#include "runtime/text_hash.h"

namespace colibri {

// The record of input line `line`, whose text is `text`, line feed included. id "": null.
inline std::string TestRecord(uint64_t line, const std::string& text, const std::string& id,
                              int status = 200, const std::string& answer = "a") {
  return fmt::format(R"({{"id":"batch_req_1","custom_id":{},"line":{},"line_hash":"{}","response":)"
                     R"({{"status_code":{},"body":{{"choices":["{}"]}}}},"error":null}})"
                     "\n",
                     id.empty() ? "null" : '"' + id + '"', line, HexOf(HashText(text)), status,
                     answer);
}

inline Manifest TestManifest() {
  Manifest manifest;
  manifest.options = {{"temperature", "1"}, {"seed", "0"}, {"ctx-size", "4096"}};
  manifest.simd_target = "AVX2";
  manifest.model = "0123456789abcdef0123456789abcdef";
  manifest.engine_version = "0.1.0";
  manifest.run_id = "run-1";
  return manifest;
}

// Checks that `text` has `part` in it; shows the text where it has not.
inline bool Has(const std::string& text, const std::string& part) {
  INFO(text);
  const bool has = text.find(part) != std::string::npos;
  CHECK(has);
  return has;
}

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// While it lives no file of this process grows beyond `bytes`: writes fail with EFBIG, after a
// short one, as they do with ENOSPC on a full drive.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(uint64_t bytes) : before_(::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit low{bytes, limit_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &limit_);
    ::signal(SIGXFSZ, before_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*before_)(int);
  rlimit limit_{};
};

}  // namespace colibri
