#include "apps/say.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "io/error.h"

namespace colibri {

void SayPart(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

void Say(std::string_view line) { SayPart(std::string(line) + "\n"); }

void Print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw IoError(std::string("standard output: ") + std::strerror(errno));
  }
}

}  // namespace colibri
