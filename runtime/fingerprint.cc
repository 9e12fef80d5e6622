#include "runtime/fingerprint.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "io/check.h"
#include "io/whole_file.h"

namespace colibri {
namespace {

constexpr uint64_t kMiddle = uint64_t{64} << 10;

class Digest {
 public:
  Digest() : state_(XXH3_createState(), XXH3_freeState) {
    COLIBRI_CHECK(state_ != nullptr && XXH3_128bits_reset(state_.get()) == XXH_OK);
  }
  // Each part goes in behind its length, so that no two lists of parts give the same bytes.
  void Add(std::string_view part) {
    Number(part.size());
    XXH3_128bits_update(state_.get(), part.data(), part.size());
  }
  void Number(uint64_t number) {
    unsigned char bytes[8];
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(number >> (8 * i));
    XXH3_128bits_update(state_.get(), bytes, sizeof bytes);
  }
  std::string Hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

void AddSmallFile(const std::string& path, Digest* digest) {
  const std::optional<std::string> text = ReadWholeFile(path);
  if (text) {
    digest->Add(*text);
  } else {
    // No file has this length: absent differs from empty.
    digest->Number(~uint64_t{0});
  }
}

std::string Read(const FileTable& files, uint32_t file, uint64_t offset, uint64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  files.ReadExact(file, offset, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace

std::string ModelFingerprint(const Container& container) {
  Digest digest;
  const std::string folder = container.Directories().front() + "/";
  for (const char* name : {"config.json", "tokenizer.json", "generation_config.json"}) {
    AddSmallFile(folder + name, &digest);
  }
  const FileTable& files = container.Files();
  digest.Number(files.Count());
  for (uint32_t file = 0; file < files.Count(); ++file) {
    digest.Add(std::filesystem::path(files.Path(file)).filename().string());
    digest.Number(files.Size(file));
    const std::string length = Read(files, file, 0, 8);
    uint64_t header = 0;
    for (size_t i = 8; i-- > 0;) header = header << 8 | static_cast<unsigned char>(length[i]);
    digest.Add(Read(files, file, 8, header));
    const uint64_t start = 8 + header, data = files.Size(file) - start;
    const uint64_t middle = std::min(data, kMiddle);
    digest.Add(Read(files, file, start + (data - middle) / 2, middle));
  }
  return digest.Hex();
}

std::string ShardNewerThan(const Container& container, const std::string& path) {
  struct stat then {};
  if (stat(path.c_str(), &then) != 0) return {};
  const FileTable& files = container.Files();
  for (uint32_t file = 0; file < files.Count(); ++file) {
    struct stat info {};
    if (fstat(files.Fd(file), &info) != 0) continue;
    if (std::pair(info.st_mtim.tv_sec, info.st_mtim.tv_nsec) >
        std::pair(then.st_mtim.tv_sec, then.st_mtim.tv_nsec)) {
      return files.Path(file);
    }
  }
  return {};
}

}  // namespace colibri
