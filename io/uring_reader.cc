#include "io/uring_reader.h"

#include <fmt/format.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "io/check.h"
#include "io/error.h"
#include "io/file.h"
#include "io/read_scheduler.h"

namespace colibri {
namespace {

// user_data of a read is generation << 32 | record index; no record has this index.
constexpr uint64_t kWakeData = 0xffffffff;

std::string Step(const char* step, int error) { return fmt::format("{}: {}", step, Reason(error)); }

class UringReader final : public Reader {
 public:
  UringReader(const FileTable& files, const ReaderOptions& options)
      : files_(files), scheduler_(files, options), wake_fd_(eventfd(0, EFD_CLOEXEC)) {
    if (wake_fd_ < 0) throw IoError(Step("eventfd", errno));
    thread_ = std::thread([this] { Run(); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return setup_error_.has_value(); });
    if (setup_error_->empty()) return;
    lock.unlock();
    thread_.join();
    close(wake_fd_);
    throw IoError(*setup_error_);
  }

  ~UringReader() override {
    Stop();
    close(wake_fd_);
  }

  void Start(ReadDone done) override {
    {
      std::lock_guard lock(mutex_);
      COLIBRI_CHECK(!started_);
      done_ = std::move(done);
      started_ = true;
    }
    changed_.notify_all();
  }

  void Submit(const ReadJob& job) override {
    scheduler_.Submit(job);
    Wake();
  }

  void Promote(uint64_t id) override {
    scheduler_.Promote(id);
    Wake();
  }

  bool Cancel(uint64_t id) override { return scheduler_.Cancel(id); }

  void CutShort(uint64_t id) override {
    scheduler_.CutShort(id);
    Wake();
  }

  void Unthrottle() override {
    scheduler_.Unthrottle();
    Wake();
  }

  void Stop() override {
    if (!thread_.joinable()) return;
    scheduler_.Close();
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    Wake();
    thread_.join();
  }

  ReaderStats Stats() const override {
    ReaderStats stats = scheduler_.Stats();
    stats.wakes = wakes_.load(std::memory_order_relaxed);
    return stats;
  }
  std::string Name() const override { return "io_uring"; }

 private:
  // One write a burst of submissions. The exchange orders it with the one in OnWake: whoever finds
  // the flag set knows that the I/O thread has yet to clear it and looks at the scheduler after.
  void Wake() {
    if (wake_pending_.exchange(true, std::memory_order_acq_rel)) return;
    const uint64_t one = 1;
    while (write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // The whole life of the ring: SINGLE_ISSUER demands that its creator is the one that submits.
  void Run() {
    std::string error = SetUp();
    const bool usable = error.empty();
    {
      std::lock_guard lock(mutex_);
      setup_error_ = std::move(error);
    }
    changed_.notify_all();
    if (usable) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return started_ || stopping_; });
      }
      Loop();
    }
    if (ring_open_) io_uring_queue_exit(&ring_);
  }

  // "" or the step that failed. Ends with one read through the ring, because some sandboxes let a
  // ring be made and refuse its use, and kernels before 5.6 lack the operation.
  std::string SetUp() {
    const unsigned entries = scheduler_.Depth() + 1;
    int error = io_uring_queue_init(entries, &ring_,
                                    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    // Kernels before 6.1 do not know these flags.
    if (error == -EINVAL) error = io_uring_queue_init(entries, &ring_, 0);
    if (error < 0) return Step("io_uring_setup", -error);
    ring_open_ = true;

    if (const uint32_t count = files_.Count(); count > 0) {
      std::vector<int> fds(size_t{2} * count);
      for (uint32_t file = 0; file < count; ++file) {
        fds[file] = files_.Fd(file);
        fds[count + file] = files_.DirectFd(file);
      }
      error = io_uring_register_files(&ring_, fds.data(), static_cast<unsigned>(fds.size()));
      if (error < 0) return Step("io_uring_register(files)", -error);
    }

    Wake();
    ArmWake();
    error = io_uring_submit_and_wait(&ring_, 1);
    if (error < 0) return Step("io_uring_enter", -error);
    io_uring_cqe* completion = nullptr;
    error = io_uring_peek_cqe(&ring_, &completion);
    if (error < 0) return Step("io_uring completion", -error);
    const int received = completion->res;
    io_uring_cqe_seen(&ring_, completion);
    if (received < 0) return Step("io_uring read", -received);
    OnWake();
    return "";
  }

  io_uring_sqe* NextEntry() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    // Depth + 1 entries, and no more are ever out.
    COLIBRI_CHECK(entry != nullptr);
    return entry;
  }

  void ArmWake() {
    io_uring_sqe* entry = NextEntry();
    io_uring_prep_read(entry, wake_fd_, &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data64(entry, kWakeData);
    wake_armed_ = true;
  }

  void OnWake() {
    wake_armed_ = false;
    wake_pending_.exchange(false, std::memory_order_acq_rel);
  }

  bool Stopping() {
    std::lock_guard lock(mutex_);
    return stopping_;
  }

  void Loop() {
    for (;;) {
      // When stopping, the wake read has been answered (Stop wrote) or will be, and is not renewed:
      // its buffer is a member and must not be written after the ring is gone.
      const bool stopping = Stopping();
      if (!wake_armed_ && !stopping) ArmWake();
      const uint64_t wait_ns = Fill();
      const std::vector<FinishedRead> finished = scheduler_.TakeFinished();
      if (!finished.empty()) {
        // The drive works while the callbacks run.
        if (io_uring_sq_ready(&ring_) > 0) CheckEntered(io_uring_submit(&ring_));
        for (const FinishedRead& read : finished) done_(read.id, read.result);
        continue;
      }
      if (stopping && !wake_armed_ && scheduler_.Empty()) return;
      Sleep(wait_ns);
      wakes_.fetch_add(1, std::memory_order_relaxed);
      Reap();
    }
  }

  // Puts every segment the scheduler gives into the ring; returns what the throttle wants waited.
  uint64_t Fill() {
    for (;;) {
      const ReadScheduler::Turn turn = scheduler_.TryNext();
      if (!turn.segment) return turn.wait_ns;
      const Segment& segment = *turn.segment;
      io_uring_sqe* entry = NextEntry();
      // No IOSQE_ASYNC: it would force a kernel worker thread on every read. No registered buffers:
      // over slots of huge pages they read at the same rate and took 13.5 ms of processor a GB
      // against 10 without (medians of 14 interleaved runs, kernel 6.18).
      const uint32_t slot = segment.direct ? files_.Count() + segment.file : segment.file;
      if (segment.write) {
        io_uring_prep_write(entry, static_cast<int>(slot), segment.memory, segment.bytes,
                            segment.offset);
      } else {
        io_uring_prep_read(entry, static_cast<int>(slot), segment.memory, segment.bytes,
                           segment.offset);
      }
      entry->flags |= IOSQE_FIXED_FILE;
      io_uring_sqe_set_data64(entry, uint64_t{segment.generation} << 32 | segment.index);
    }
  }

  static void CheckEntered(int result) {
    // These pass: interrupted, out of request memory for the moment, completions to be reaped
    // first, the time is up. What was not taken stays in the ring and goes with the next call.
    COLIBRI_CHECK(result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY ||
                  result == -ETIME);
  }

  void Sleep(uint64_t wait_ns) {
    if (wait_ns == 0) {
      CheckEntered(io_uring_submit_and_wait(&ring_, 1));
      return;
    }
    wait_ns = std::min<uint64_t>(wait_ns, 1'000'000'000);
    __kernel_timespec timeout{};
    timeout.tv_sec = static_cast<long long>(wait_ns / 1'000'000'000);
    timeout.tv_nsec = static_cast<long long>(wait_ns % 1'000'000'000);
    io_uring_cqe* ignored = nullptr;
    CheckEntered(io_uring_submit_and_wait_timeout(&ring_, &ignored, 1, &timeout, nullptr));
  }

  void Reap() {
    unsigned head = 0, count = 0;
    io_uring_cqe* completion = nullptr;
    io_uring_for_each_cqe(&ring_, head, completion) {
      ++count;
      const uint64_t data = completion->user_data;
      if (data == kWakeData) {
        OnWake();
      } else {
        scheduler_.Complete(static_cast<uint32_t>(data), static_cast<uint32_t>(data >> 32),
                            completion->res);
      }
    }
    io_uring_cq_advance(&ring_, count);
  }

  const FileTable& files_;
  ReadScheduler scheduler_;
  const int wake_fd_;
  std::atomic<bool> wake_pending_{false};
  std::atomic<uint64_t> wakes_{0};

  std::mutex mutex_;  // guards the following four
  std::condition_variable changed_;
  std::optional<std::string> setup_error_;
  bool started_ = false;
  bool stopping_ = false;
  ReadDone done_;  // set before started_, constant afterwards

  // The I/O thread's own.
  io_uring ring_{};
  bool ring_open_ = false;
  bool wake_armed_ = false;
  uint64_t wake_count_ = 0;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<Reader> MakeUringReader(const FileTable& files, const ReaderOptions& options) {
  return std::make_unique<UringReader>(files, options);
}

}  // namespace colibri
