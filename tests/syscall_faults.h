// Lets system calls of a program fail, without the program knowing: a seccomp filter asks this
// process about every one of some calls, and the answer is an errno, a value, nothing at all, or
// "go on". So a test can fail the n-th write to a folder, or never answer a read. No privileges are
// needed; kernels before 5.5 and sandboxes that forbid it are said (Possible). x86-64 and others
// whose calls are named below.
// Threads: one object, one thread beside the one that makes it: the filter belongs to the thread
// that starts the programs.
#pragma once

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace colibri {

struct SystemCall {
  int number = 0;
  std::string path;  // of its descriptor or its first name; "" unless it has one
  std::array<uint64_t, 6> arguments{};
};

struct CallAnswer {
  enum class Kind : uint8_t { kGoOn, kFail, kReturn, kNever } kind = Kind::kGoOn;
  int error = 0;
  int64_t value = 0;
  static CallAnswer GoOn() { return {}; }
  static CallAnswer Fail(int error) { return {Kind::kFail, error, 0}; }
  static CallAnswer Return(int64_t value) { return {Kind::kReturn, 0, value}; }
  static CallAnswer Never() { return {Kind::kNever, 0, 0}; }
};

class SyscallFaults {
 public:
  // Called on a thread of its own, one call after the other.
  using Decide = std::function<CallAnswer(const SystemCall& call)>;

  // Runs `body` on a new thread; the programs that it starts are asked about. Returns when it has.
  // `body` must not throw. Throws std::system_error where the kernel refuses.
  SyscallFaults(const std::vector<int>& calls, const Decide& decide,
                const std::function<void()>& body) {
    std::promise<int> listener, ready;
    std::thread filtered([&] {
      const int fd = Install(calls);
      listener.set_value(fd < 0 ? -errno : fd);
      if (fd < 0 || ready.get_future().get() != 0) return;
      body();
    });
    const int fd = listener.get_future().get();
    if (fd < 0) {
      filtered.join();
      throw std::system_error(-fd, std::generic_category(), "seccomp");
    }
    const int over = eventfd(0, EFD_CLOEXEC);
    std::thread asked([&] { Answer(fd, over, decide); });
    ready.set_value(0);
    filtered.join();
    const uint64_t one = 1;
    (void)!write(over, &one, sizeof one);
    asked.join();
    close(over);
    close(fd);
  }

  static bool Possible() {
    try {
      SyscallFaults(
          {SYS_fsync}, [](const SystemCall&) { return CallAnswer::GoOn(); }, [] {});
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

 private:
  // The listener, or -1 and errno.
  static int Install(const std::vector<int>& calls) {
    std::vector<sock_filter> filter = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offsetof(seccomp_data, nr)))};
    for (const int call : calls) {
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
      filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    }
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
    return static_cast<int>(
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program));
  }

  static void Answer(int listener, int over, const Decide& decide) {
    for (;;) {
      std::array<pollfd, 2> fds = {pollfd{listener, POLLIN, 0}, pollfd{over, POLLIN, 0}};
      if (poll(fds.data(), fds.size(), -1) < 0) continue;
      if ((fds[0].revents & POLLIN) == 0) {
        if (fds[1].revents != 0) return;
        continue;
      }
      seccomp_notif asked{};
      // ENOENT: whoever asked is dead by now.
      if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) continue;
      const CallAnswer answer = decide(CallOf(asked));
      seccomp_notif_resp response{};
      response.id = asked.id;
      switch (answer.kind) {
        case CallAnswer::Kind::kNever:
          continue;
        case CallAnswer::Kind::kGoOn:
          response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
          break;
        case CallAnswer::Kind::kFail:
          response.error = -answer.error;
          break;
        case CallAnswer::Kind::kReturn:
          response.val = answer.value;
          break;
      }
      ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
    }
  }

  static SystemCall CallOf(const seccomp_notif& asked) {
    SystemCall call;
    call.number = asked.data.nr;
    for (size_t i = 0; i < call.arguments.size(); ++i) call.arguments[i] = asked.data.args[i];
    const auto pid = static_cast<pid_t>(asked.pid);
    switch (call.number) {
      case SYS_openat:
      case SYS_unlinkat:
      case SYS_renameat2:
        call.path = TextOf(pid, call.arguments[1]);
        break;
#ifdef SYS_rename
      case SYS_rename:
      case SYS_unlink:
        call.path = TextOf(pid, call.arguments[0]);
        break;
#endif
      default:
        call.path = DescriptorOf(pid, call.arguments[0]);
    }
    return call;
  }
  static std::string DescriptorOf(pid_t pid, uint64_t fd) {
    std::error_code none;
    return std::filesystem::read_symlink(
               "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(static_cast<int>(fd)), none)
        .string();
  }
  static std::string TextOf(pid_t pid, uint64_t address) {
    // Page by page: the one behind the text may not be there.
    constexpr uint64_t kPage = 4096;
    std::string text;
    while (text.size() < PATH_MAX && text.find('\0') == std::string::npos) {
      std::array<char, kPage> part;
      const uint64_t from = address + text.size();
      iovec local{part.data(), part.size()};
      iovec remote{reinterpret_cast<void*>(from), kPage - from % kPage};
      const ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
      if (got <= 0) break;
      text.append(part.data(), static_cast<size_t>(got));
    }
    return text.substr(0, text.find('\0'));
  }
};

// Of the calls about a file below a folder the n-th is answered so.
struct NthCall {
  std::vector<int> calls;
  std::string folder;
  uint64_t n = 1;  // from 1
  CallAnswer answer;
  uint64_t seen = 0;
  SystemCall hit;  // the call that was answered so; number 0: none

  CallAnswer operator()(const SystemCall& call) {
    if (!call.path.starts_with(folder)) return CallAnswer::GoOn();
    if (++seen != n) return CallAnswer::GoOn();
    hit = call;
    if (hit.number == 0) hit.number = -1;  // SYS_read is 0
    return answer;
  }
  bool Fired() const { return hit.number != 0; }
};

}  // namespace colibri
