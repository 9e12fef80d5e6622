#include "apps/process.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

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

}  // namespace colibri
