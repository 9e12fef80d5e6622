#include "io/error.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace colibri {

std::string Reason(int error) {
  rlimit limit{};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    return fmt::format("{} (ulimit -n is {})", std::strerror(error), limit.rlim_cur);
  }
  return std::strerror(error);
}

}  // namespace colibri
