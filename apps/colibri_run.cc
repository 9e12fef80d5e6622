// colibri-run: a prompt file in, exact answers out.
#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "apps/flags.h"
#include "apps/run.h"
#include "apps/say.h"
#include "io/error.h"
#include "io/file.h"

namespace {

// Puts /dev/null in the place of a standard stream that is closed (cron, daemons, `<&-`), so that
// no file opened later takes its number. True if it was closed.
bool HoldIfClosed(int fd) {
  if (fcntl(fd, F_GETFD) >= 0) return false;
  (void)open("/dev/null", O_RDWR);  // the lowest number that is free: this one, in ascending order
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const bool no_input = HoldIfClosed(STDIN_FILENO), no_output = HoldIfClosed(STDOUT_FILENO);
  HoldIfClosed(STDERR_FILENO);
  // At once: shards that just fit would leave no number for tokenizer, prompts and ring.
  colibri::RaiseOpenFileLimit();
  return colibri::WithExitCodes("colibri-run", [&] {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const colibri::ParsedCommandLine line = colibri::ParseRunCommandLine(arguments);
    if (!line.options) {
      line.exit_code == 0 ? colibri::Print(line.text) : colibri::SayPart(line.text);
      return line.exit_code;
    }
    if (line.options->version) {
      colibri::Print(colibri::VersionText());
      return 0;
    }
    const colibri::RunOptions& options = *line.options;
    if (no_input && options.input == "-") throw colibri::IoError("standard input is closed");
    if (no_output && options.output == "-" && !options.plan) {
      throw colibri::IoError("standard output is closed: -o names a file for the answers");
    }
    return colibri::RunPrompts(options);
  });
}
