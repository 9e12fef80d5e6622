#include "apps/say.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "io/error.h"

namespace colibri {

namespace {

constexpr std::string_view kClearLine = "\r\033[K";

// Never destroyed: the thread of the signals may speak to the end.
struct Screen {
  std::timed_mutex mutex;
  std::string status;  // what stands in the last line
};
Screen& TheScreen() {
  static Screen* screen = new Screen;
  return *screen;
}

void Write(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace

void SayPart(std::string_view text) {
  Screen& screen = TheScreen();
  const std::lock_guard lock(screen.mutex);
  if (screen.status.empty()) return Write(text);
  Write(fmt::format("{}{}{}", kClearLine, text, screen.status));
}

void ShowStatus(std::string_view line) {
  Screen& screen = TheScreen();
  const std::lock_guard lock(screen.mutex);
  if (line.empty() && screen.status.empty()) return;
  Write(fmt::format("{}{}", kClearLine, line));
  screen.status = line;
}

void SayOrGiveUp(std::string_view text) {
  constexpr auto kPatience = std::chrono::milliseconds(250);
  Screen& screen = TheScreen();
  const std::unique_lock lock(screen.mutex, kPatience);
  if (!lock.owns_lock()) return;
  std::string all;
  if (!screen.status.empty()) all += kClearLine;
  if (text.empty()) screen.status.clear();
  all.append(text).append(screen.status);
  // A pipe that is ready takes PIPE_BUF bytes without waiting.
  for (std::string_view rest = all; !rest.empty();) {
    pollfd room{STDERR_FILENO, POLLOUT, 0};
    if (poll(&room, 1, static_cast<int>(kPatience.count())) != 1) return;
    const ssize_t wrote =
        write(STDERR_FILENO, rest.data(), std::min<size_t>(rest.size(), PIPE_BUF));
    if (wrote < 0 && errno != EINTR) return;
    rest.remove_prefix(static_cast<size_t>(std::max<ssize_t>(wrote, 0)));
  }
}

void Say(std::string_view line) { SayPart(std::string(line) + "\n"); }

void Print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw IoError(std::string("standard output: ") + std::strerror(errno));
  }
}

}  // namespace colibri
