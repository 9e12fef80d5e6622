#include "apps/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "io/error.h"
#include "io/file.h"

namespace colibri {
namespace {

bool HoldIfClosed(int fd) {
  if (fcntl(fd, F_GETFD) >= 0) return false;
  (void)open("/dev/null", O_RDWR);  // the lowest number that is free: this one, in ascending order
  return true;
}

}  // namespace

ClosedStreams PrepareProcess() {
  ClosedStreams closed;
  closed.input = HoldIfClosed(STDIN_FILENO);
  closed.output = HoldIfClosed(STDOUT_FILENO);
  HoldIfClosed(STDERR_FILENO);
  RaiseOpenFileLimit();
  ::signal(SIGXFSZ, SIG_IGN);
  return closed;
}

void RequireStack() {
  constexpr rlim_t kWanted = rlim_t{8} << 20, kLeast = rlim_t{1} << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= kWanted) return;
  limit.rlim_cur = std::min(kWanted, limit.rlim_max);
  (void)setrlimit(RLIMIT_STACK, &limit);
  if (limit.rlim_cur < kLeast) {
    throw IoError(fmt::format("the stack limit is {} kB, 1024 at least are needed (ulimit -Hs)",
                              limit.rlim_cur / 1024));
  }
  // What threads get was settled when the process started.
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, limit.rlim_cur);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

}  // namespace colibri
