// colibri-run: a prompt file in, exact answers out.
#include <string>
#include <vector>

#include "apps/flags.h"
#include "apps/process.h"
#include "apps/run.h"
#include "apps/say.h"
#include "io/error.h"

int main(int argc, char** argv) {
  const colibri::ClosedStreams closed = colibri::PrepareProcess();
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
    if (closed.input && options.input == "-") throw colibri::IoError("standard input is closed");
    if (closed.output && options.output == "-" && !options.plan) {
      throw colibri::IoError("standard output is closed: -o names a file for the answers");
    }
    return colibri::RunPrompts(options);
  });
}
