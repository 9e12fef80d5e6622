// A directory of a test's own, gone with the object, and files of known bytes in it.
#pragma once

#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace colibri {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "colibri-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed for " + name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string Path(const std::string& name) const { return (path_ / name).string(); }

  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
    return Path(name);
  }

 private:
  std::filesystem::path path_;
};

// Byte `offset` of a pattern file with this seed; neighbouring pages and files differ.
inline std::byte PatternByte(uint32_t seed, uint64_t offset) {
  const uint64_t mixed = (offset + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  return static_cast<std::byte>(mixed >> 56);
}

inline std::string PatternBytes(uint32_t seed, uint64_t bytes) {
  std::string text(bytes, '\0');
  for (uint64_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(PatternByte(seed, i));
  return text;
}

}  // namespace colibri
