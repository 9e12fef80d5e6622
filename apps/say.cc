#include "apps/say.h"

#include <fmt/format.h>

#include <cerrno>
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
  std::mutex mutex;
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

void Say(std::string_view line) { SayPart(std::string(line) + "\n"); }

void Print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw IoError(std::string("standard output: ") + std::strerror(errno));
  }
}

}  // namespace colibri
