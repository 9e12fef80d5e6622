#include "runtime/output_writer.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace colibri {

OutputWriter::OutputWriter(Options options) : options_(std::move(options)) {
  struct stat info {};
  regular_ = fstat(options_.fd, &info) == 0 && S_ISREG(info.st_mode);
  // The thread inherits a mask of everything: SIGPIPE then stays pending and write() says EPIPE,
  // and the signals of the user reach the threads that wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

OutputWriter::~OutputWriter() { Finish(); }

void OutputWriter::Push(std::string record, uint32_t token,
                        std::shared_ptr<const LineOutcome> line) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(record), token, std::move(line)});
  }
  wake_.notify_one();
}

OutputWriter::State OutputWriter::Finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  return GetState();
}

OutputWriter::State OutputWriter::GetState() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::string OutputWriter::Error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void OutputWriter::Run() {
  std::vector<Entry> batch;
  const auto work = [this] { return !queue_.empty() || finishing_; };
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (!unsynced_) {
        wake_.wait(lock, work);
      } else {
        wake_.wait_until(lock, next_sync_, work);
      }
      if (queue_.empty() && finishing_) break;
      batch.swap(queue_);
    }
    for (const Entry& entry : batch) {
      const bool whole = Write(entry.record);
      if (whole && entry.line && options_.on_line) options_.on_line(*entry.line);
      if (unsynced_ && std::chrono::steady_clock::now() >= next_sync_) Sync();
      if (entry.token != kNoToken && options_.on_written) options_.on_written(entry.token);
    }
    batch.clear();
    if (unsynced_ && std::chrono::steady_clock::now() >= next_sync_) Sync();
  }
  Sync();
}

bool OutputWriter::Write(const std::string& record) {
  if (GetState() != State::kOk) return false;
  size_t done = 0;
  while (done < record.size()) {
    const ssize_t wrote = write(options_.fd, record.data() + done, record.size() - done);
    if (wrote >= 0) {
      done += static_cast<size_t>(wrote);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // A descriptor that someone else made non-blocking.
      pollfd room{options_.fd, POLLOUT, 0};
      poll(&room, 1, -1);
    } else if (errno != EINTR) {
      const int error = errno;
      TakeBack(done);
      Fail("writing", error);
      return false;
    }
  }
  if (regular_ && !unsynced_) {
    unsynced_ = true;
    next_sync_ = std::chrono::steady_clock::now() + options_.sync_interval;
  }
  return true;
}

// Cuts off the first bytes of a record whose rest could not be written, unless someone else has
// appended behind them.
void OutputWriter::TakeBack(size_t bytes) {
  if (!regular_ || bytes == 0) return;
  struct stat info {};
  const off_t end = lseek(options_.fd, 0, SEEK_CUR);
  if (end < static_cast<off_t>(bytes) || fstat(options_.fd, &info) != 0 || info.st_size != end) {
    return;
  }
  const off_t whole = end - static_cast<off_t>(bytes);
  if (ftruncate(options_.fd, whole) != 0) return;  // the next start cuts it off (output_file.h)
  lseek(options_.fd, whole, SEEK_SET);
  unsynced_ = true;
}

void OutputWriter::Sync() {
  if (!unsynced_) return;
  unsynced_ = false;
  while ((options_.sync ? options_.sync(options_.fd) : fdatasync(options_.fd)) != 0) {
    if (errno == EINTR) continue;
    Fail("syncing", errno);
    return;
  }
}

void OutputWriter::Fail(const char* action, int error) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kOk) return;
  if (error == EPIPE) {
    state_ = State::kReaderGone;
    return;
  }
  state_ = State::kFailed;
  error_ = fmt::format("{} {} failed: {}", action, options_.name,
                       std::generic_category().message(error));
  if (!options_.advice.empty()) error_ += "; " + options_.advice;
}

}  // namespace colibri
