// Lists and opens the shards of a container and indexes their tensors by name.
#include "io/container.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/error.h"
#include "io/safetensors_header.h"
#include "io/strict_json.h"

namespace colibri {
namespace {

constexpr std::string_view kExtension = ".safetensors";
constexpr size_t kMaxStamps = 4096;
constexpr size_t kMaxStampsText =
    kMaxStamps * 512;  // a name and a format each; parsed it is larger
constexpr const char* kHolds =
    "a model directory holds config.json, tokenizer.json and shards such as out-00000.safetensors";

// Base name -> path, of the first directory that has the name. Hidden files are left out: copies
// from macOS bring a "._out-00000.safetensors" beside each shard.
void ListShards(const std::string& directory, std::map<std::string, std::string>& shards) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    FailToOpen(directory, errno, fmt::format("; {}", kHolds));
  }
  if (!S_ISDIR(info.st_mode)) {
    throw ModelError(fmt::format("{}: not a directory; {}", directory, kHolds));
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(directory.c_str()), ::closedir);
  if (dir == nullptr) FailToOpen(directory, errno);
  while (const dirent* entry = ::readdir(dir.get())) {
    const std::string name = entry->d_name;
    if (name.front() == '.' || !name.ends_with(kExtension)) continue;
    shards.emplace(name, directory + "/" + name);
  }
}

bool IsText(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) {
    const auto b = static_cast<unsigned char>(c);
    return (b >= 0x20 && b < 0x7f) || b == '\n' || b == '\r' || b == '\t';
  });
}

// What the file is, given that its first bytes are no usable header length.
std::string DescribeNonHeader(std::string_view start, uint64_t length, uint64_t file_bytes) {
  if (start.starts_with("version https://git-lfs")) {
    return "a Git LFS pointer, not the shard itself; fetch it with git lfs pull";
  }
  if (IsText(start)) return "text, not a safetensors file";
  if (length == 0) return "no safetensors file: header length 0";
  if (length > file_bytes - 8) {
    return fmt::format("truncated, or no safetensors file: has {} bytes, header alone has {}",
                       file_bytes, length);
  }
  return fmt::format("header of {} bytes, at most {} expected", length, kMaxHeaderBytes);
}

}  // namespace

void CheckRegular(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) FailToOpen(path, errno);
  if (!S_ISREG(info.st_mode)) throw ModelError(fmt::format("{}: not a regular file", path));
}

void FailToOpen(const std::string& path, int error, const std::string& advice) {
  const std::string text = fmt::format("{}: {}{}", path, Reason(error), advice);
  for (const int wrong : {ENOENT, ENOTDIR, EACCES, ELOOP, ENAMETOOLONG}) {
    if (error == wrong) throw ModelError(text);
  }
  throw IoError(text);
}

Container::Container(const std::vector<std::string>& directories) : directories_(directories) {
  if (directories_.empty()) throw ModelError("no model directory given");
  std::map<std::string, std::string> shards;
  for (const std::string& directory : directories_) ListShards(directory, shards);
  if (shards.empty()) {
    throw ModelError(
        fmt::format("{}: no *.safetensors file in it; {}", fmt::join(directories_, ", "), kHolds));
  }
  for (const auto& [name, path] : shards) {
    CheckRegular(path);
    ReadHeader(files_.Add(path));
  }
}

void Container::ReadHeader(uint32_t file) {
  const std::string& path = files_.Path(file);
  const uint64_t file_bytes = files_.Size(file);
  std::string start(static_cast<size_t>(std::min<uint64_t>(file_bytes, 64)), '\0');
  files_.ReadExact(file, 0, std::as_writable_bytes(std::span(start)));
  if (file_bytes < 8) {
    const bool text = file_bytes > 0 && IsText(start);
    throw ModelError(fmt::format("{}: {}", path,
                                 text ? "text, not a safetensors file"
                                      : fmt::format("empty or truncated: {} bytes", file_bytes)));
  }
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(start[i]);
  if (length == 0 || length > file_bytes - 8 || length > kMaxHeaderBytes) {
    throw ModelError(fmt::format("{}: {}", path, DescribeNonHeader(start, length, file_bytes)));
  }
  std::string text(static_cast<size_t>(length), '\0');
  files_.ReadExact(file, 8, std::as_writable_bytes(std::span(text)));
  SafetensorsHeader header = ParseSafetensorsHeader(text, 8 + length, file_bytes, path);
  for (auto& [name, entry] : header.tensors) {
    entry.file = file;
    const auto [first, fresh] = tensors_.try_emplace(std::move(name), std::move(entry));
    if (fresh) continue;
    if (repeated_++ == 0) {
      repeat_ = fmt::format("tensor {} is in {} and again in {}", Printable(first->first),
                            files_.Path(first->second.file), path);
    }
  }
  if (!header.formats.empty()) AddStamps(header.formats, path);
}

void Container::AddStamps(const std::string& text, const std::string& path) {
  const std::string what = path + ": metadata colibri.fmt";
  if (text.size() > kMaxStampsText) {
    throw ModelError(fmt::format("{}: longer than {} bytes", what, kMaxStampsText));
  }
  const nlohmann::json stamps = ParseStrictJson(text, what);
  if (!stamps.is_object()) throw ModelError(what + ": not an object");
  for (const auto& [name, value] : stamps.items()) {
    if (!value.is_string()) {
      throw ModelError(fmt::format("{}: the format of {} is not a string", what, Printable(name)));
    }
    const auto& format = value.get_ref<const std::string&>();
    const auto [it, fresh] = stamps_.emplace(name, format);
    if (!fresh && it->second != format) {
      throw ModelError(fmt::format("{}: {} is stamped {}, elsewhere {}", what, Printable(name),
                                   Printable(format), Printable(it->second)));
    }
  }
  if (stamps_.size() > kMaxStamps) {
    throw ModelError(fmt::format("{}: more than {} stamped tensors", what, kMaxStamps));
  }
}

std::string Container::RepeatNote() const {
  if (repeated_ == 0) return {};
  const std::string others = repeated_ > 1 ? fmt::format(" ({} more likewise)", repeated_ - 1) : "";
  return fmt::format("{}{}: the first is used", repeat_, others);
}

const TensorEntry* Container::Find(std::string_view name) const {
  const auto it = tensors_.find(std::string(name));
  return it == tensors_.end() ? nullptr : &it->second;
}

std::string_view Container::Stamp(std::string_view name) const {
  const auto it = stamps_.find(name);
  return it == stamps_.end() ? std::string_view() : it->second;
}

std::vector<std::string> Container::Names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace colibri
