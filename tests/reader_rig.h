// What tests of readers share: every backend, files of known bytes, a collector of answers.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/error.h"
#include "io/file.h"
#include "io/reader.h"
#include "tests/fake_reader.h"
#include "tests/temp_dir.h"

namespace colibri {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

// Collects callbacks; waits for them.
class Answers {
 public:
  ReadDone Callback() {
    return [this](uint64_t id, const ReadResult& result) {
      {
        std::lock_guard lock(mutex_);
        CHECK(results_.emplace(id, result).second);
        threads_[std::this_thread::get_id()]++;
      }
      changed_.notify_all();
    };
  }
  void WaitFor(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.size() >= count; });
  }
  ReadResult Of(uint64_t id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.count(id) > 0; });
    return results_.at(id);
  }
  size_t Count() {
    std::lock_guard lock(mutex_);
    return results_.size();
  }
  size_t Threads() {
    std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, ReadResult> results_;
  std::map<std::thread::id, int> threads_;
};

// The scripted reader with a thread that completes whatever is submitted.
class AutoFakeReader final : public Reader {
 public:
  explicit AutoFakeReader(const FileTable& files) : fake_(&files) {}
  ~AutoFakeReader() override { Stop(); }
  void Start(ReadDone done) override {
    fake_.Start(std::move(done));
    thread_ = std::thread([this] {
      for (;;) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || fake_.PendingCount() > 0; });
        if (stopping_) return;
        lock.unlock();
        fake_.CompleteOldest();
      }
    });
  }
  void Submit(const ReadJob& job) override {
    {
      std::lock_guard lock(mutex_);
      fake_.Submit(job);
    }
    changed_.notify_all();
  }
  void Promote(uint64_t id) override { fake_.Promote(id); }
  bool Cancel(uint64_t id) override { return fake_.Cancel(id); }
  void Stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    fake_.Stop();
  }
  ReaderStats Stats() const override { return {}; }
  std::string Name() const override { return "fake"; }

 private:
  FakeReader fake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

using Make = std::function<std::unique_ptr<Reader>(const FileTable&, const ReaderOptions&)>;

struct Backend {
  std::string name;
  Make make;
  bool direct = false;
};

inline std::vector<Backend> RealBackends() {
  const Make pread = [](const FileTable& files, const ReaderOptions& options) {
    return MakeReader(IoBackend::kPread, files, options, nullptr);
  };
  const Make uring = [](const FileTable& files, const ReaderOptions& options) {
    return MakeReader(IoBackend::kUring, files, options, nullptr);
  };
  std::vector<Backend> backends = {{"pread", pread, false}, {"pread direct", pread, true}};
  try {
    uring(FileTable(), {});
    backends.push_back({"io_uring", uring, false});
    backends.push_back({"io_uring direct", uring, true});
  } catch (const IoError& error) {
    MESSAGE("io_uring not tested: " << error.what());
  }
  return backends;
}

inline std::vector<Backend> AllBackends() {
  std::vector<Backend> backends = RealBackends();
  const Make fake = [](const FileTable& files, const ReaderOptions&) {
    return std::make_unique<AutoFakeReader>(files);
  };
  backends.push_back({"fake", fake, false});
  return backends;
}

// Runs `body` for each backend, its name in the messages of failed checks.
inline void ForEach(const std::vector<Backend>& backends,
                    const std::function<void(const Backend&)>& body) {
  for (const Backend& backend : backends) {
    CAPTURE(backend.name);
    body(backend);
  }
}

// Three files of pattern bytes: 3 MiB + 5000, 100, 64 KiB.
struct Shards {
  explicit Shards(const Backend& backend) {
    for (size_t i = 0; i < Bytes().size(); ++i) {
      files.Add(dir.Write(std::to_string(i), Bytes()[i]));
    }
    if (backend.direct) files.EnableDirect();
  }

  static const std::vector<std::string>& Bytes() {
    static const std::vector<std::string> bytes = {PatternBytes(0, 3 * kMiB + 5000),
                                                   PatternBytes(1, 100), PatternBytes(2, 65'536)};
    return bytes;
  }

  // Every byte of the extent that the file has arrived.
  static bool Holds(const std::byte* destination, const Extent& extent) {
    const std::string& file = Bytes()[extent.file];
    const size_t bytes = std::min<size_t>(extent.bytes, file.size() - extent.offset);
    return std::memcmp(destination + extent.dest, file.data() + extent.offset, bytes) == 0;
  }

  TempDir dir;
  FileTable files;
};

}  // namespace colibri
